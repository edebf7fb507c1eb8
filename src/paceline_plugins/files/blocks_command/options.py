# SPDX-License-Identifier: Apache-2.0
"""The options of `paceline blocks`, checked before anything starts."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.console import refuse, refusing
from paceline.core import parent_death
from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline_plugins.files.plan import Plan

KEPT = 3
"""Merged models of the newest blocks."""
TOOL_S = 86400.0
"""For which a worker waits at most for the tools of the others."""


@dataclass(frozen=True)
class ModelOptions:
    """The options about the model and its merging; see `paceline blocks --help`."""

    model: Path
    out: Path | None
    work: Path | None
    layout: str | None
    rule: str


@dataclass(frozen=True)
class DataOptions:
    """The options about the data."""

    data: Path | None
    parts: int | None
    epochs: int
    seed: int


@dataclass(frozen=True)
class RateOptions:
    """The options about the rate."""

    lr: float | None
    lr_final: float | None
    loss: str | None
    newbob: bool

    def check(self) -> None:
        """Refuse numbers and combinations that cannot be."""
        for name, value in (("--lr", self.lr), ("--lr-final", self.lr_final)):
            if value is not None and not (math.isfinite(value) and value > 0):
                refuse(f"{name} must be a number above 0, got {value}")
        if self.lr is None and (self.lr_final is not None or self.newbob):
            refuse("--lr-final and --newbob change the rate of --lr: give it, and {lr} in the tool's command")
        if self.newbob and self.loss is None:
            refuse("--newbob follows a held-out loss that the tool prints: say by --loss REGEX where it stands")
        try:
            pattern = re.compile(self.loss or "")
        except re.error as error:
            refuse(f"--loss {self.loss!r} is no regular expression: {error}")
        if pattern.groups > 1:
            refuse(f"--loss {self.loss!r} has {pattern.groups} groups; give one, around the number")


def plan_of(command: list[str], workers: int, model: ModelOptions, data: DataOptions, rate: RateOptions) -> Plan:
    """The plan of a run; refuses what cannot be.

    Args:
        command: of the tool, with placeholders.
        workers: of all hosts.
        model, data, rate: the options.
    """
    rate.check()
    for name, value in (("--epochs", data.epochs), ("--parts", data.parts or workers)):
        if value < 1:
            refuse(f"{name} must be at least 1, got {value}")
    from paceline_plugins.files import parts, placeholders  # here, because torch loads for seconds
    from paceline_plugins.files.plan import Plan, checked_rule, checksum

    with refusing():
        placeholders.check(command, data.data is not None, rate.lr is not None)
        checked_rule(model.rule)
        form, layout = _format(model.layout)
        content = _checked_model(model.model, form, layout)
        count = data.parts or workers
        parts.check_divides(workers, count, 0)
        lines = None if data.data is None else parts.read_list(data.data)
        parts.Parts(count, data.seed, True, lines)
        work = (model.work or Path(f"{model.model.name}.blocks")).absolute()
        return Plan(
            command=command,
            starter=[sys.executable, "-I", "-S", parent_death.__file__],
            model=str(model.model.absolute()),
            out=str((model.out or work / f"trained{model.model.suffix}").absolute()),
            work=str(work),
            rule=model.rule,
            format=form,
            layout=layout,
            data=None if data.data is None else str(data.data.absolute()),
            parts=count,
            epochs=data.epochs,
            shuffle=True,
            seed=data.seed,
            lr=rate.lr,
            lr_final=rate.lr_final,
            loss=rate.loss,
            newbob=rate.newbob,
            keep=KEPT,
            timeout_s=TOOL_S,
            model_sum=checksum(content),
            list_sum="" if lines is None else checksum(b"".join(lines)),
        )


def _format(layout: str | None) -> tuple[str | None, str | None]:
    """The format's name and the layout of raw numbers, of `--layout`; None: recognised."""
    from paceline_plugins.files.formats import NAMES

    return (layout, None) if layout is None or layout in NAMES else ("flat", layout)


def _checked_model(path: Path, asked: str | None, layout: str | None) -> bytes:
    """The contents of the model file, which has a known format, and numbers."""
    from paceline_plugins.files import formats

    if path == Path():
        refuse("give the model file to start from: --model FILE")
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        refuse(f"the model {path} {what} (looked in {Path.cwd()})")
    data = path.read_bytes()
    form = formats.recognise(path, data) if asked is None else formats.named(asked, layout)
    try:
        tensors = form.read(data).tensors
    except DataError as error:
        refuse(f"the model {path} cannot be read as {form.name}: {error}")
    if not sum(tensor.numel() for tensor in tensors.values()):
        refuse(f"the model {path} holds no floating-point number as {form.name}: there is nothing to merge")
    return data
