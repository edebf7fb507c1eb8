# SPDX-License-Identifier: Apache-2.0
"""The options of `paceline run`, in records: a field is an option."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import refuse
from paceline.cli.console.program_options import (
    AsIs,
    ForceZeroLines,
    Log,
    Master,
    Module,
    Overwrite,
    Quiet,
    RandomData,
    RuleText,
    Timeout,
)
from paceline.communication import kinds
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.cli.run.program import Program

SHOWN = (
    "workers",
    "rule",
    "hosts",
    "elastic",
    "restarts",
    "checkpoint",
    "log",
    "tensorboard",
    "as_is",
    "random_data",
    "module",
    "print_only",
)
"""What `paceline run --help` shows; `--help-all` shows all."""
MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "metrics": "prometheus_client"}
"""Option, which is also the extra -> what has to be installed."""


@dataclass(frozen=True)
class StartOptions:
    """How the workers start, and what is written and shown."""

    rule: RuleText = None
    restarts: Annotated[
        int, typer.Option(help="How often to restart all workers when one fails, to resume from a checkpoint.")
    ] = 0
    log: Log = None
    overwrite: Overwrite = False
    timeout: Timeout = 600.0
    transport: Annotated[
        str,
        typer.Option(
            help="How the workers exchange: auto (torch.distributed), channel (rings over paceline's sockets) or mpi "
            "(under mpiexec)."
        ),
    ] = "auto"
    receipts: Annotated[
        bool,
        typer.Option(
            "--receipts", help="Each worker writes what it sent to and took from every merge, for paceline verify."
        ),
    ] = False
    quiet: Quiet = False
    print_only: Annotated[
        bool,
        typer.Option("--print", "--dry-run", help="Print the commands of this and other hosts, and start nothing."),
    ] = False


@dataclass(frozen=True)
class HostOptions:
    """The hosts of the run; None where not given, and the scheduler may say."""

    workers: Annotated[
        int | None, typer.Option(help="Number of workers; with several hosts, on each host.", show_default="1")
    ] = None
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="N|a,b,...",
            help="Hosts to start over ssh: a,b,c, user@a:2222, @FILE, slurm, or all of paceline.toml. Or their number: "
            "then start this command on each.",
            show_default="1, or as Slurm says",
        ),
    ] = None
    host_index: Annotated[
        int | None,
        typer.Option(help="Which of the hosts this is, from 0; ranks follow it.", show_default="0, or as Slurm says"),
    ] = None
    master: Master = None

    @property
    def named(self) -> bool:
        """Whether `--hosts` has names, not a number."""
        return self.hosts is not None and not re.fullmatch(r"\s*[+-]?\d+\s*", self.hosts)

    @property
    def count(self) -> int | None:
        """Of hosts, where `--hosts` is a number."""
        return None if self.hosts is None or self.named else int(self.hosts)

    @property
    def complete(self) -> bool:
        """Whether the scheduler need not be asked."""
        return self.count == 1 or None not in (self.count, self.host_index, self.master)


@dataclass(frozen=True)
class ProgramOptions:
    """What the program is, and whether it gets zero lines."""

    as_is: AsIs = False
    random_data: RandomData = False
    force_zero_lines: ForceZeroLines = False
    module: Module = False


@dataclass(frozen=True)
class Security:
    """The certificates of the workers' own connections."""

    tls: Annotated[
        Path | None, typer.Option(help="Folder of cert.pem, key.pem and ca.pem, instead of certificates for the job.")
    ] = None
    job: Annotated[
        Path | None, typer.Option(help="File of the job's secret: host 0 writes it; copy or share it with other hosts.")
    ] = None
    in_the_clear: Annotated[
        bool, typer.Option("--open", help="No certificates: connections of asynchronous rules are not encrypted.")
    ] = False

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        options = (("--tls", self.tls), ("--job", self.job), ("--open", self.in_the_clear))
        return [name for name, value in options if value]

    def check(self) -> None:
        """Refuse options that exclude each other, and certificates that are missing or unreadable."""
        if len(self.given) > 1:
            refuse(f"{' and '.join(self.given)} exclude each other: give one of them")
        if self.tls is None:
            return
        from paceline.communication.sockets.tls import TLS

        try:
            TLS.folder(self.tls).server()
        except PacelineError as error:
            refuse(f"--tls: {error}")


@dataclass(frozen=True)
class ElasticOptions:
    """An elastic run: this launcher hosts it, or joins one."""

    elastic: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="Elastic run: fewest and most workers, of all hosts together; few train at first if the rule has "
            "grow='auto'.",
        ),
    ] = None
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --elastic: an address of this host for other hosts to join."),
    ] = None
    join: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Join the elastic run whose launcher listens there.")
    ] = None
    invite: Annotated[
        bool,
        typer.Option(
            "--invite",
            help="With --elastic and --listen: print an invitation, with which `paceline join` works anywhere.",
        ),
    ] = False
    public: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --invite: where others reach --listen, if a router forwards it."),
    ] = None
    relay: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="With --elastic: a file with the launcher's line of a `paceline relay` elsewhere; - asks.",
        ),
    ] = None
    grace: Annotated[
        float | None, typer.Option(help="With --elastic: seconds after which an exchange calls in stragglers.")
    ] = None
    again: Annotated[
        Path | None, typer.Option(metavar="LOG", help="Continue the elastic run of a killed launcher.")
    ] = None

    @property
    def given(self) -> bool:
        """Whether the run is elastic."""
        return self.elastic is not None or self.join is not None


@dataclass(frozen=True)
class TrackingOptions:
    """Trackers and checkpoints for programs that name none, also for unchanged ones."""

    tensorboard: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write what is logged into DIR, for TensorBoard.")
    ] = None
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Send what is logged to this project of W&B.")
    ] = None
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="PORT|HOST:PORT",
            help="Serve each worker's numbers for Prometheus, worker k of a host at PORT + k; a PORT alone is for this "
            "host only.",
        ),
    ] = None
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Directory or URL of checkpoint steps, for programs that name none."),
    ] = None
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Exchanges between two steps of --checkpoint.", show_default="100")
    ] = None

    def check(self, program: Program | None) -> None:
        """Refuse options that cannot work, before anything starts."""
        if self.checkpoint_every is not None and self.checkpoint is None:
            refuse("--checkpoint-every belongs to --checkpoint PLACE: give both")
        given = [name for name, value in vars(self).items() if value is not None and name != "checkpoint_every"]
        if given and program is not None and program.source is None:
            refuse(f"--{given[0]} is for Python programs, and {program.name} is an executable: leave it out")
        for name in given:
            if not getattr(self, name).strip():
                refuse(f"--{name} was given nothing: name a place, or leave it out")
            module = MODULES.get(name)
            if module is not None and importlib.util.find_spec(module) is None:
                refuse(f"--{name} needs {module}, which is not installed: pip install 'paceline[{name}]'")
        if self.metrics is not None:
            _address(self.metrics)
        if self.tensorboard is not None:
            _writable(self.tensorboard)

    def check_ports(self, workers: int) -> None:
        """Refuse ports of `--metrics` that other programs have: worker k of this host listens at PORT + k."""
        host, _, first = _address(self.metrics or "0").rpartition(":")
        for port in range(int(first), int(first) + workers) if int(first) else ():
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                socket.create_server((host.strip("[]"), port), family=family).close()
            except OSError as error:
                refuse(f"--metrics {self.metrics}: {host}:{port} cannot be used ({error.strerror}); give another port")

    def check_zero_lines(self, restarts: int) -> None:
        """Refuse what an unchanged program cannot do: it begins at its beginning, whatever steps there are."""
        if self.checkpoint is None:
            return
        how = "add paceline.attach and run.resume to the program (docs/guide/faults.md)"
        if restarts:
            refuse(f"--restarts starts an unchanged program at its beginning, where --checkpoint cannot go on: {how}")
        steps = sorted(Path(self.checkpoint).glob("step-*")) if "://" not in self.checkpoint else []
        if steps:
            shown = f"--checkpoint {self.checkpoint} holds {steps[-1].name} of an earlier run"
            refuse(f"{shown}, and an unchanged program cannot go on from it: give another place, or {how}")

    def environment(self) -> dict[str, str]:
        """Variables of the workers."""
        result = {
            "PACELINE_TENSORBOARD": None if self.tensorboard is None else os.path.abspath(self.tensorboard),
            "PACELINE_WANDB": self.wandb,
            "PACELINE_METRICS": None if self.metrics is None else _address(self.metrics),
            "PACELINE_CHECKPOINT": None if self.checkpoint is None else _place(self.checkpoint),
            "PACELINE_CHECKPOINT_EVERY": None if self.checkpoint_every is None else str(self.checkpoint_every),
        }
        return {name: value for name, value in result.items() if value is not None}


@dataclass(frozen=True)
class RunOptions:
    """All of them."""

    hosts: HostOptions
    start: StartOptions
    program: ProgramOptions
    security: Security
    elastic: ElasticOptions
    tracking: TrackingOptions

    def check(self) -> None:
        """Refuse options that exclude each other."""
        start, elastic = self.start, self.elastic
        if start.restarts < 0:
            refuse(f"--restarts must be at least 0, got {start.restarts}")
        if elastic.given and self.hosts.count not in (None, 1):
            refuse("--hosts is for runs of a fixed size: with --elastic, other hosts use --join HOST:PORT")
        if elastic.given and start.restarts:
            refuse("--restarts starts all workers again; an elastic run replaces only the lost worker: leave it out")
        if elastic.given and start.receipts:
            refuse("--receipts is for runs of a fixed size: in an elastic run the members change; leave it out")
        for name, value in (("--listen", elastic.listen), ("--grace", elastic.grace)):
            if value is not None and not elastic.given:
                refuse(f"{name} belongs to --elastic MIN:MAX")
        for name, given in (("--invite", elastic.invite), ("--public", elastic.public), ("--relay", elastic.relay)):
            if given and elastic.elastic is None:
                refuse(f"{name} belongs to --elastic MIN:MAX, on the host where the run starts")
        if start.transport not in ("auto", "channel") and start.transport not in (known := kinds()):
            refuse(f"--transport must be one of {', '.join(known)}, got {start.transport!r}")
        if elastic.given and start.transport != "auto":
            refuse(
                f"--transport {start.transport} is for runs of a fixed size: elastic runs have connections of their own"
            )


def _writable(text: str) -> None:
    """Refuse a directory that this user can neither write into nor make."""
    path = Path(text).absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    if "://" not in text and not (there.is_dir() and os.access(there, os.W_OK)):
        refuse(f"--tensorboard {text} cannot be written ({there} is no directory that you may write into)")


def _place(text: str) -> str:
    """A URL, or a path that does not depend on the working directory."""
    return text if "://" in text else os.path.abspath(text)


def _address(text: str) -> str:
    """HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 65536 or (":" in text and not host):
        refuse(f"--metrics must be PORT or HOST:PORT such as 9400 or 10.0.0.1:9400, got {text!r}")
    return f"{host or '127.0.0.1'}:{port}"
