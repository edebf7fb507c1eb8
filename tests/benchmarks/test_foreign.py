# SPDX-License-Identifier: Apache-2.0
"""What `quality/foreign.py` says of counts: right, the whole job on every worker, a leak, a late draw, a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.modules import FOLDER, imported

if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not beside the package", allow_module_level=True)

TRAINED, HELD_OUT = [str(number) for number in range(6)], [str(number) for number in range(6, 8)]


@pytest.fixture(scope="module")
def judge() -> Iterator[ModuleType]:
    """The module, which goes out of sight again."""
    with imported("_foreign.judge") as modules:
        yield modules["_foreign.judge"]


def counted(judge: ModuleType, folder: Path, passes: list[list[str]], steps: int = 0, rate: float = 0.1) -> Any:
    """Counts of one process: each pass draws these samples; the first `steps` passes are trained in."""
    events: list[dict[str, Any]] = []
    for number, drawn in enumerate(passes):
        for item in drawn:
            events.append({"k": "item", "d": "Set:8", "i": item, "p": number})
            if number < steps:
                events.append({"k": "step", "o": "SGD#0", "lr": [rate], "p": number})
        events.append({"k": "over", "p": number})
    folder.mkdir()
    (folder / "000-1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return judge.read(folder)[0]


def of_two(judge: ModuleType, folder: Path, passes: list[list[list[str]]]) -> tuple[Any, list[Any]]:
    """A program alone, with two epochs and two evaluations, and two workers of it with these passes."""
    alone = counted(judge, folder / "alone", [TRAINED, TRAINED, HELD_OUT, HELD_OUT], steps=2)
    return alone, [counted(judge, folder / str(rank), each, steps=2) for rank, each in enumerate(passes)]


def test_a_sample_that_one_worker_trains_and_another_evaluates_is_seen(judge: ModuleType, tmp_path: Path) -> None:
    mixed = [*TRAINED[:2], "6"]
    parts = [[TRAINED[:3], TRAINED[3:], HELD_OUT, HELD_OUT], [mixed, mixed, HELD_OUT, HELD_OUT]]
    alone, workers = of_two(judge, tmp_path, parts)
    assert not judge.samples(alone, workers)["Set:8"]["right"]


def test_an_epoch_twice_on_one_worker_is_late(judge: ModuleType, tmp_path: Path) -> None:
    alone = counted(judge, tmp_path / "alone", [TRAINED, TRAINED], steps=2)
    parts = [[TRAINED[:3], TRAINED[:3]], [TRAINED[3:], TRAINED[3:]]]
    right = [counted(judge, tmp_path / f"right-{rank}", each, steps=2) for rank, each in enumerate(parts)]
    assert judge.samples(alone, right)["Set:8"]["late"] == 0
    twice = [TRAINED[:3] * 2, TRAINED[3:] * 2]  # the first half of the time one half, then the other
    wrong = [counted(judge, tmp_path / f"wrong-{rank}", [twice[0], twice[1]], steps=2) for rank in range(1)]
    assert judge.samples(alone, wrong)["Set:8"]["late"] > 0


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("paceline_plugins.zero.refusals.Refusal: train.py:3: no loader", "refused before training"),
        ("MemoryError", "WRONG: crash before training"),
    ],
)
def test_a_refusal_is_a_sentence_of_ours(judge: ModuleType, tmp_path: Path, said: str, wanted: str) -> None:
    (tmp_path / "out.txt").write_text("", encoding="utf-8")
    (tmp_path / "err.txt").write_text(f"Traceback (most recent call last):\n{said}\n", encoding="utf-8")
    assert judge.verdict({"codes": [0, 1]}, 0, judge.Done(1, 1.0, tmp_path, [])) == wanted
