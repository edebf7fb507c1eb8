# SPDX-License-Identifier: Apache-2.0
"""`paceline data`: pack samples into shards, verify them, plan whether a storage is fast enough."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from paceline.cli.console import err, error_panel, near, out, refuse
from paceline.cli.console.program_options import AsJson
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline_plugins.data.packed.packing.pack import PackProgress, Result
    from paceline_plugins.data.packed.plan import Need, StoragePlan
    from paceline_plugins.data.packed.verify import Report

DAMAGED = 1
MOST_READERS = 32
SECONDS = 5.0
"""Of each of the two measurements of `plan`."""
REFRESH = 64  # samples between two updates of the bar

app = typer.Typer(
    help="Pack data into shards, verify them, plan a storage.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.command("pack")
def pack_command(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder, or a .tar (.gz .bz2 .xz .zst), .jsonl, .parquet, .ark or .scp file.", show_default=False
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to make.", show_default=False)],
    seed: Annotated[
        int | None, typer.Option(help="Shuffle with this seed; without it the source's order is kept.")
    ] = None,
) -> None:
    """Pack a source into tar shards (WebDataset's convention) with an index.

    Files of a folder that differ only after the last dot are one sample; the folder's name is its class.
    Exit code 0: packed; 2: failed, and nothing was written.
    """
    from paceline_plugins.data.packed.packing import open_source
    from paceline_plugins.data.packed.packing.pack import pack

    if seed is not None and seed < 0:
        refuse(f"--seed must be at least 0, got {seed}")
    try:
        opened = open_source(source)
        with _sigterm_as_interrupt(), _bar("packing") as (bar, task):
            told = _progress_callback(bar, task)
            result = pack(opened, output, seed=seed, jobs=_threads(), on_sample=told)
    except PacelineError as error:
        refuse(str(error))
    _print_packed(result, output)


def _threads() -> int:
    return min(4, os.cpu_count() or 1)


def _progress_callback(bar: Progress, task: TaskID) -> Callable[[PackProgress], None]:
    from paceline_plugins.data.packed.sizes import bytes_text

    def told(done: PackProgress) -> None:
        if done.samples % REFRESH and done.samples > 1:
            return
        shards = f"{done.shards} shard{'s' if done.shards > 1 else ''}"
        about = f"{done.samples:,} samples, {bytes_text(done.bytes)}, {shards}"
        total = None if done.fraction is None else 1.0
        bar.update(task, completed=done.fraction or 0.0, total=total, about=about)

    return told


def _print_packed(result: Result, output: Path) -> None:
    from paceline_plugins.data.packed.sizes import bytes_text

    index, console = result.index, out()
    count = len(index.shards)
    size = bytes_text(index.total_bytes)
    console.print(
        f"{near(output)}: {index.samples:,} samples in {count:,} shard{'s' if count > 1 else ''}, {size}",
        soft_wrap=True,
        markup=False,
    )
    for kind, number in sorted(result.kinds.items(), key=lambda item: -item[1]):
        console.print(f"  {number:,} of {kind}", soft_wrap=True, markup=False)
    for note in result.notes:
        err().print(f"note: {note}", soft_wrap=True, markup=False)


@app.command("verify")
def verify_command(
    place: Annotated[str, typer.Argument(help="A packed data set: a directory or a URL.", show_default=False)],
) -> None:
    """Check packed shards against their index: checksums, sizes, counts, offsets.

    Exit code 0: intact; 1: damaged; 2: no such data set.
    """
    from paceline_plugins.data.packed.storage import Storage, is_url, local_path
    from paceline_plugins.data.packed.verify import read_index, verify

    if not is_url(place) and not local_path(place).is_dir():
        refuse(f"{place} is not a directory; give the directory or the URL that holds index.json")
    try:
        opened = Storage(place)
        total = read_index(opened).total_bytes
        with _bar("verifying") as (bar, task):
            bar.update(task, total=total)
            report = verify(opened, jobs=_threads(), on_shard=lambda shard: bar.advance(task, shard.bytes))
    except PacelineError as error:
        err().print(error_panel("damaged", Text(str(error), style="default")))
        raise typer.Exit(DAMAGED) from error
    _print_verified(report)
    raise typer.Exit(DAMAGED if report.damaged else 0)


def _print_verified(report: Report) -> None:
    from paceline_plugins.data.packed.sizes import bytes_text

    console, index = out(), report.index
    for damage in report.damaged:
        for fault in damage.faults:
            console.print(Text.assemble(("DAMAGED ", "bold red"), (f"{damage.shard}: ", "bold"), fault), soft_wrap=True)
    for note in report.notes:
        err().print(f"note: {note}", soft_wrap=True, markup=False)
    size = f"{index.samples:,} samples in {len(index.shards):,} shards, {bytes_text(index.total_bytes)}"
    if report.damaged:
        console.print(Text(f"damaged: {len(report.damaged)} of {len(index.shards)} shards; {size}", style="bold red"))
    else:
        console.print(Text(f"intact: {size}", style="bold green"), soft_wrap=True)


@app.command("plan")
def plan_command(
    place: Annotated[str, typer.Argument(help="The data: a directory or a URL.", show_default=False)],
    workers: Annotated[int, typer.Option(help="Number of workers on all hosts.")],
    samples_per_second: Annotated[float, typer.Option(help="Samples a second that each worker consumes.")],
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 1,
    cache: Annotated[str | None, typer.Option(help="Cache of each host, for a URL: 200GB.")] = None,
    link: Annotated[str | None, typer.Option(help="Link of a host to the storage: 1Gbit, 100MB.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a storage and forecast whether workers wait for it.

    Exit code 0: fast enough; 1: workers would wait; 2: invalid options.
    """
    from paceline_plugins.data.packed.plan import Need, to_json
    from paceline_plugins.data.packed.sizes import parse_bytes, parse_rate

    if workers < 1 or not 1 <= hosts <= workers:
        refuse(f"--workers must be at least 1 and --hosts lie in 1..workers, got {workers} and {hosts}")
    if not (samples_per_second > 0 and math.isfinite(samples_per_second)):
        refuse(f"--samples-per-second must be above 0, got {samples_per_second:g}")
    try:
        rate = None if link is None else parse_rate(link, "--link")
        kept = 0 if cache is None else parse_bytes(cache, "--cache")
        plan = _measure(place, Need(workers, hosts, samples_per_second, rate, kept))
    except PacelineError as error:
        refuse(str(error))
    if as_json:
        print(json.dumps(to_json(plan)), flush=True)
    else:
        _print_plan(plan)
    raise typer.Exit(0 if plan.feeds else 1)


def _measure(text: str, need: Need) -> StoragePlan:
    from paceline_plugins.data.packed import measure
    from paceline_plugins.data.packed.plan import judge
    from paceline_plugins.data.packed.storage import Storage

    storage = Storage(text)
    readers = min(MOST_READERS, max(2, need.workers_a_host))
    with _bar("measuring") as (bar, task):
        bar.update(task, total=3, about="files")
        holding = measure.inspect(storage)
        bar.update(task, completed=1, about="one reader")
        latency = measure.first_byte_s(storage, holding)
        one = measure.read_speed(storage, holding, 1, SECONDS)
        bar.update(task, completed=2, about=f"{readers} readers")
        several = measure.read_speed(storage, holding, readers, SECONDS)
    return judge(need, holding, storage.remote, latency, one, several)


def _print_plan(plan: StoragePlan) -> None:
    from paceline_plugins.data.packed.sizes import bytes_text

    console, holding, need = out(), plan.holding, plan.need
    facts = Table.grid(padding=(0, 2, 0, 0))
    what = "shards" if holding.kind == "packed" else "files"
    total = "more than was listed" if holding.bytes is None else bytes_text(holding.bytes)
    facts.add_row("data", f"{len(holding.files):,} {what}, {total}; {bytes_text(holding.bytes_per_sample)} a sample")
    facts.add_row("first byte", f"after {1e3 * plan.first_byte_s:.3g} ms")
    facts.add_row("one reader", f"{bytes_text(plan.one.bytes_s)}/s")
    facts.add_row(f"{plan.several.readers} readers", f"{bytes_text(plan.several.bytes_s)}/s")
    all_workers = need.workers * need.samples_s * holding.bytes_per_sample
    facts.add_row("need in all", f"{bytes_text(all_workers)}/s on {need.hosts} host{'s' if need.hosts > 1 else ''}")
    console.print(facts)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("a host", "from cache", "needs", "has", "waits"):
        table.add_column(column, justify="left" if column == "a host" else "right")
    for epoch in plan.epochs:
        rates = f"{bytes_text(epoch.need_bytes_s)}/s", f"{bytes_text(epoch.have_bytes_s)}/s"
        table.add_row(epoch.name, f"{100 * epoch.hits:.0f} %", *rates, f"{100 * epoch.waiting:.0f} %")
    console.print()
    console.print(table)
    console.print()
    console.print(Text(plan.verdict, style="bold green" if plan.feeds else "bold red"), soft_wrap=True)
    for advice in plan.advice:
        console.print(f"  -> {advice}", soft_wrap=True, markup=False)
    for note in plan.notes:
        console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)


@contextlib.contextmanager
def _bar(name: str) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar, on a terminal only."""
    console = err()
    columns = (
        SpinnerColumn(),
        TextColumn(name),
        BarColumn(),
        TextColumn("{task.fields[about]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar, bar.add_task(name, total=None, about="")


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM stop packing as Ctrl-C does, so that partial files are removed."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
