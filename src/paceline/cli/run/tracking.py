# SPDX-License-Identifier: Apache-2.0
"""Trackers and checkpoints for programs that name none, also for unchanged ones: the options, and their checks."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import refuse
from paceline.cli.run.program import Program

TensorboardOption = Annotated[
    str | None, typer.Option("--tensorboard", metavar="DIR", help="Write what is logged into DIR, for TensorBoard.")
]
WandbOption = Annotated[
    str | None, typer.Option("--wandb", metavar="PROJECT", help="Send what is logged to this project of W&B.")
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="PORT|HOST:PORT",
        help="Serve each worker's numbers for Prometheus, worker k of a host at PORT + k; a PORT alone is for this "
        "host only.",
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", metavar="PLACE", help="Directory or URL of checkpoint steps, for programs that name none."
    ),
]
MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "metrics": "prometheus_client"}
"""Option, which is also the extra -> what has to be installed."""


@dataclass(frozen=True)
class TrackingOptions:
    """The options; None where not given."""

    tensorboard: str | None = None
    wandb: str | None = None
    metrics: str | None = None
    checkpoint: str | None = None

    def check(self, program: Program | None) -> None:
        """Refuse options that cannot work, before anything starts."""
        given = [name for name, value in vars(self).items() if value is not None]
        if given and program is not None and program.source is None:
            refuse(
                f"--{given[0]} is for Python programs, and {program.name} is an executable: see paceline watch, and "
                "paceline report, which read the logs"
            )
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

    def check_zero_lines(self, restarts: int) -> None:
        """Refuse what an unchanged program cannot do: it begins at its beginning, whatever steps there are."""
        if self.checkpoint is None:
            return
        how = "add paceline.attach and run.resume to the program (docs/guide/faults.md)"
        if restarts:
            refuse(
                "--restarts would start the unchanged program at its beginning, and --checkpoint holds steps of its "
                f"middle: leave one of them out, or {how}"
            )
        steps = sorted(Path(self.checkpoint).glob("step-*")) if "://" not in self.checkpoint else []
        if steps:
            refuse(
                f"--checkpoint {self.checkpoint} holds {steps[-1].name} of an earlier run, and an unchanged program "
                f"cannot go on from it: give another place, load {steps[-1].name}/global.safetensors in the program, "
                f"or {how}"
            )

    def environment(self) -> dict[str, str]:
        """Variables of the workers."""
        found = {
            "PACELINE_TENSORBOARD": None if self.tensorboard is None else os.path.abspath(self.tensorboard),
            "PACELINE_WANDB": self.wandb,
            "PACELINE_METRICS": None if self.metrics is None else _address(self.metrics),
            "PACELINE_CHECKPOINT": None if self.checkpoint is None else _place(self.checkpoint),
        }
        return {name: value for name, value in found.items() if value is not None}


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
