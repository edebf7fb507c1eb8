# SPDX-License-Identifier: Apache-2.0
"""The options of a run over files, as one machine's launcher hands them to its workers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.doors.adapters.elsewhere import check_rule
from paceline.errors import DataError, UnsupportedError
from paceline.rules.recipes import make_rule, rule_from_text
from paceline.rules.rule import Rule

VERSION = 1
MAY_CHANGE = ("out", "epochs", "keep", "lr", "lr_final", "timeout_s", "loss", "starter", "work", "data", "model")
"""Options that may differ when a run is continued; of data and model the contents count."""
OPTIONS = {
    "command": "the tool's command",
    "model_sum": "--model",
    "list_sum": "--data",
    "format": "--layout",
    "layout": "--layout",
    "rule": "--rule",
    "parts": "--parts",
    "seed": "--seed",
    "shuffle": "--shuffle",
    "newbob": "--newbob",
}


@dataclass(frozen=True)
class Plan:
    """The options."""

    command: list[str]  # of the tool, with placeholders
    starter: list[str]  # in front of it, with this process's id between them: ends the tool with its worker
    model: str  # file to start from
    out: str  # file of the trained model
    work: str  # folder of everything else
    rule: str  # as text
    format: str | None  # format, layout: of model files; None recognises it
    layout: str | None
    data: str | None  # list of lines, or None
    parts: int  # of an epoch
    epochs: int  # passes over the data
    shuffle: bool  # whether epochs have orders of their own
    seed: int  # of the orders
    lr: float | None  # lr, lr_final: rate of the first block, and what it falls to; None without one
    lr_final: float | None
    loss: str | None  # pattern whose group is the loss in what the tool prints, or None
    newbob: bool  # whether the rate is halved by it
    keep: int  # merged models that are kept
    timeout_s: float  # that a worker waits for the tools of the others
    model_sum: str = ""  # model_sum, list_sum: checksums of the contents
    list_sum: str = ""
    version: int = field(default=VERSION)

    @property
    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan in a file; raises `DataError` where there is none."""
        try:
            return cls.of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is no plan of paceline blocks ({error})") from error

    @classmethod
    def of(cls, said: dict[str, Any]) -> Plan:
        """Of the values of `asdict`."""
        if said["version"] != VERSION:
            raise ValueError(f"its version is {said['version']!r}, and this paceline reads {VERSION}")
        return cls(**said)

    @property
    def settled(self) -> dict[str, Any]:
        """What must stay when a run is continued, the same on all machines."""
        return {name: value for name, value in asdict(self).items() if name not in MAY_CHANGE}


def check_continues(plan: Plan, earlier: Plan) -> None:
    """Refuse to continue a run with other options; raises `UnsupportedError`."""
    before, now = earlier.settled, plan.settled
    odd = [OPTIONS.get(name, name) for name in now if before[name] != now[name]]
    if odd:
        raise UnsupportedError(
            f"{plan.work} holds a run with other options: {', '.join(odd)} differ. Give the same to continue it, "
            "another --work, or --overwrite to begin anew"
        )


def checked_rule(text: str) -> Rule:
    """The rule of whole blocks, of which each is one invocation of the tool.

    Raises:
        RuleError: there is no such rule.
        UnsupportedError: it cannot merge files.
    """
    asked = rule_from_text(text)
    schedule = asked.schedule
    if not schedule.exchanges_blocks:
        raise UnsupportedError(
            f"--rule {text} does not merge models block by block; model files need averaging, bmuf or diloco"
        )
    if asked.arguments.get("period", 1) != 1:
        raise UnsupportedError(f"--rule {text}: here a block is one invocation of the tool; leave period out")
    if asked.steps_with_gradients or schedule.overlap or schedule.fragments > 1 or schedule.grow is not None:
        raise UnsupportedError(
            f"--rule {text}: a closed tool gives no gradients and does not train during an exchange; leave warmup, "
            "within, overlap, fragments and grow out"
        )
    rule = make_rule(text, {"period": 1})
    check_rule(rule, momentum=False)
    return rule


def checksum(data: bytes) -> str:
    """Of a file's contents."""
    return hashlib.sha256(data).hexdigest()
