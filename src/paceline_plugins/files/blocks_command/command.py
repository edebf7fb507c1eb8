# SPDX-License-Identifier: Apache-2.0
"""`paceline blocks`: a closed tool on N workers, whose model files are merged block by block."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import command_app, err, near, refuse, refusing
from paceline.cli.console.program_options import CONTEXT, Arguments, Master, Overwrite, ProgramCommand, Quiet
from paceline.cli.launch.spawn import Command
from paceline.cli.run import checks, fixed
from paceline.cli.run.conclusion import conclude
from paceline.cli.run.hosts import resolve_cluster
from paceline.cli.run.options import HostOptions, Security
from paceline.cli.run.program import find
from paceline.flow.lock import Lock
from paceline_plugins.files.blocks_command.options import DataOptions, ModelOptions, RateOptions, plan_of

if TYPE_CHECKING:
    from paceline_plugins.files.plan import Plan

WORKER = "paceline_plugins.files.worker"  # which loads torch
START_S = 600.0
"""For which hosts wait for each other at the start."""


def blocks(
    script: Annotated[Path, typer.Argument(metavar="TOOL", help="The tool.", show_default=False)],
    arguments: Arguments = None,
    model: Annotated[
        Path, typer.Option(help="Model file to start from; it stays as it is.", show_default=False)
    ] = Path(),
    out: Annotated[
        Path | None, typer.Option(help="Where the trained model goes.", show_default="trained.* in the work folder")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of workers; with several hosts, on each host.", show_default="1")
    ] = None,
    rule: Annotated[str, typer.Option(help="How models are merged: averaging, bmuf, diloco.")] = "bmuf",
    parts: Annotated[
        int | None,
        typer.Option(help="Parts of an epoch; each block takes one for each worker.", show_default="the workers"),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 1,
    data: Annotated[
        Path | None, typer.Option(help="List of samples, one a line: {list} is a file of this part's lines.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the orders, and of {seed}.")] = 0,
    lr: Annotated[float | None, typer.Option(help="Rate of the first block, for {lr}.")] = None,
    lr_final: Annotated[float | None, typer.Option(help="Rate to which it falls exponentially.")] = None,
    loss: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="Finds the loss in the tool's output, such as 'loss=([0-9.e+-]+)'."),
    ] = None,
    newbob: Annotated[
        bool, typer.Option("--newbob", help="Halve the rate once the loss stalls at an epoch's end, and stop.")
    ] = False,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Of model files: npy, npz, safetensors, kaldi, caffemodel; of raw numbers f32, or entries "
            "such as 'skip:16, w:f32:784x100, b:f32:100'.",
            show_default="recognised",
        ),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints and logs.", show_default="./MODEL.blocks")
    ] = None,
    overwrite: Overwrite = False,
    restarts: Annotated[
        int, typer.Option(help="How often to restart all workers when one fails, from the last block.")
    ] = 0,
    hosts: Annotated[
        int | None,
        typer.Option(help="Number of hosts; start this command on each.", show_default="1, or as Slurm says"),
    ] = None,
    host_index: Annotated[
        int | None, typer.Option(help="Which of the hosts this is, from 0.", show_default="0, or as Slurm says")
    ] = None,
    master: Master = None,
    quiet: Quiet = False,
) -> None:
    """Train with a tool that cannot be changed: a block is one invocation of it on each worker.

    The tool reads the model file {model}, trains on its part of the data, and writes the model file {model_out}; the
    files of all workers are merged under the rule, and the next block begins from the result. Other placeholders:
    {part} (from 0), {job} (from 1), {parts}, {list}, {lr}, {epoch}, {block}, {rank}, {local_rank}, {workers}, {seed}.

    The same command continues a run that was stopped or killed. Several hosts need the same model and list, each.
    """
    program = find(script, arguments)
    asked = HostOptions(workers, None if hosts is None else str(hosts), host_index, master)
    cluster, _ = resolve_cluster(asked, START_S)
    plan = plan_of(
        program.command(),
        cluster.size,
        ModelOptions(model, out, work, layout, rule),
        DataOptions(data, parts, epochs, seed),
        RateOptions(lr, lr_final, loss, newbob),
    )
    checks.free_port(cluster)
    checks.check_crowd(cluster.workers)
    folder = Path(plan.work)
    with contextlib.closing(_lock(folder, cluster.host_index)):
        place = _prepare(plan, cluster.host_index, overwrite)
        directory = checks.log_directory(checks.new_directory(str(folder / "logs")), cluster, False)
        added = fixed.environment(cluster, None, directory, Security(in_the_clear=True), announces=False)
        started = time.monotonic()
        command = Command([sys.executable, "-u", "-m", WORKER, str(place)], added, directory / "output")
        outcome = fixed.launch(cluster, command, quiet, restarts)
        code = conclude(outcome, cluster, directory, time.monotonic() - started, quiet)
        if code == 0 and not quiet and cluster.host_index == 0:
            err().print(f"the trained model: {near(Path(plan.out))}", markup=False, soft_wrap=True)
        elif code and not quiet:
            err().print(
                f"what was merged so far is in {near(folder)}; the same command continues after the last block",
                markup=False,
                soft_wrap=True,
            )
    fixed.leave(code, outcome)


def _lock(folder: Path, host_index: int) -> Lock:
    """Make the folder, and hold its lock; refuses a folder that another launcher of this host uses."""
    with refusing():
        folder.mkdir(parents=True, exist_ok=True)
        return Lock(folder, f"lock-{host_index}")


def _prepare(plan: Plan, host_index: int, overwrite: bool) -> Path:
    """Write the plan for the workers of this host; returns its file. Refuses to continue with other options."""
    from paceline_plugins.files.plan import Plan, check_continues  # late: it loads torch
    from paceline_plugins.files.workplace import write

    folder = Path(plan.work)
    place = folder / f"plan-{host_index}.json"
    with refusing():
        if overwrite or not any((folder / name).exists() for name in ("merged", "steps")):  # else nothing is done yet
            _clear(folder, place)
        elif not place.exists():
            refuse(f"{folder} holds a run without {place.name}; give another --work, or --overwrite to begin anew")
        else:
            check_continues(plan, Plan.read(place))
        write(place, plan.text.encode())
    return place


def _clear(folder: Path, place: Path) -> None:
    """Remove an earlier run; its plan last, so that a kill in between leaves a run that can be continued.

    Hosts that share the folder may all do so: none of them trains before all have met.
    """
    for name in ("merged", "steps", "scratch"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in (folder / "journal.json", place):
        path.unlink(missing_ok=True)


app = command_app(blocks, cls=ProgramCommand, context_settings=CONTEXT)
