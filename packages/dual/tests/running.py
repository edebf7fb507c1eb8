# SPDX-License-Identifier: Apache-2.0
"""Trainings of a tiny pair, and who kills them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline_dual.pair import Pair
from paceline_dual.settings import Course
from paceline_dual.training import train
from tasks import HELD, labels_data, labels_pair


def trained(folder: Path, course: Course = HELD, **more: Any) -> tuple[Pair, list[dict[str, Any]]]:
    pair = labels_pair()
    return pair, train(pair, more.pop("data", labels_data()), course, folder, **more)


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


class Killed(Exception):
    """In place of a killed process."""


class Killer:
    """Dies after a step, or at an evaluation."""

    def __init__(self, step: int = -1, row: int = -1) -> None:
        self.step, self.at = step, row

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        if done == self.step:
            raise Killed

    def row(self, row: dict[str, Any]) -> None:
        if row["step"] == self.at:
            raise Killed

    def say(self, text: str) -> None:
        pass
