# SPDX-License-Identifier: Apache-2.0
"""What five articles claim, and where our figure for each claim stands; `seeds.py` prints them beside each other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

RECORDS = Path(__file__).resolve().parents[2] / "records"
GROWTH, SPEECH, TOOL = "2026-11-23_growth", "2026-11-24_speech_plateau", "2026-11-24_c_tool"
DUAL, LIGHT, NETWORK = "2026-11-22_dual", "2026-11-22_lightrnn", "2026-11-21_communication"
SERVER, STALE, COUNTING = "2026-11-21_server", "2026-11-21_asynchronous", "2026-11-23_counting"
FRAMES = "2026-11-26_frames"

ARTICLES = {
    "bmuf": "BMUF (K. Chen, Q. Huo, ICASSP 2016)",
    "bmuf_adam": "BMUF-Adam (K. Chen, H. Ding, Q. Huo, ICASSP 2020)",
    "ddl": "DDL (M. Cho et al., 1708.02188)",
    "learning": "LightRNN, DC-ASGD, dual learning (1610.09893, 1609.08326, 1611.00179)",
    "middleware": "A middleware for GPUs on several machines (Alibaba iDST, 2016)",
}


@dataclass(frozen=True)
class Claim:
    """A claim of an article, and ours for it.

    Attributes:
        article: key of ARTICLES.
        says: what the article reports.
        asks: what our figure has to be to have reached it, in words.
        figure: ours, from the record's own files; None where nothing was measured.
        reached: whether a figure does.
        record: folder in `records`.
        why: what was measured about a claim that is not reached.
        unit: behind the figure; "share" is shown in %, with its sign.
    """

    article: str
    says: str
    asks: str
    figure: Callable[[], float | None]
    reached: Callable[[float], bool]
    record: str
    why: str = ""
    unit: str = ""


def at_most(most: float) -> Callable[[float], bool]:
    return lambda figure: figure <= most


def at_least(least: float) -> Callable[[float], bool]:
    return lambda figure: figure >= least


@cache
def read(record: str, name: str) -> Any:
    """A JSON file of a record."""
    return json.loads((RECORDS / record / name).read_text(encoding="utf-8"))


def cells(record: str, name: str, **where: Any) -> list[dict[str, Any]]:
    """Cells of a table that have these values."""
    every = read(record, name)["cells"]
    found = [cell for cell in every if all(cell[key] == value for key, value in where.items())]
    if not found:
        raise SystemExit(f"{record}/{name} has no cell with {where}: was the record made anew?")
    return found


def cell(record: str, name: str, key: str, **where: Any) -> float:
    """A value of the one cell that has these values."""
    (found,) = cells(record, name, **where)
    return float(found[key])


def speed_up(task: str, workers: int, gbit: str = "10") -> float:
    """One worker's time over that of N workers for as many samples, exchanges included."""
    (found,) = cells(GROWTH, "plateau.json", task=task, method="grown", workers=workers)
    return 1 / float(found["seconds_over_serial"][gbit])


def dual(method: str, decoding: str, measure: str = "exact") -> float:
    """Mean of both directions and all seeds, with one worker."""
    rows = [row for row in read(DUAL, "trainings.json") if row["method"] == method and row["workers"] == 1]
    return fmean(row[way][decoding][measure] for row in rows for way in ("forward", "backward"))


def perplexity(model: str) -> float:
    """Mean of the seeds."""
    return fmean(row["perplexity"] for row in read(LIGHT, "trainings.json") if row["model"] == model)


def asynchronous(task: str, way: str, workers: int) -> float:
    """Mean measure of the seeds with geometric delays: error on digits, loss on text."""
    lines = (RECORDS / STALE / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["task"] == task and row["minibatches"] in (3200, 5760)]
    ours = [row for row in rows if row["way"] == way and row["workers"] == workers]
    measured = [row for row in ours if row["delays"] in (None, "geometric")]
    return fmean(row["error" if task == "digits" else "loss"] for row in measured)


def gap_closed(task: str, way: str, workers: int) -> float:
    """Share of what `asgd` loses that a rule wins back."""
    alone, plain = asynchronous(task, "sequential", 1), asynchronous(task, "asgd", workers)
    return (plain - asynchronous(task, way, workers)) / (plain - alone)


def in_text(record: str, pattern: str) -> float:
    """A figure that a record's README states."""
    found = re.search(pattern, (RECORDS / record / "README.md").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{record}/README.md states nothing like {pattern!r}")
    return float(found[1])


def miscounted() -> int:
    """Samples that were lost or repeated in all runs of the counting record."""
    text = (RECORDS / COUNTING / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `[^|]+` \| \d+ \| \d+ \| (\d+) \| (\d+) \| \d+ \|$", text, re.MULTILINE)
    if len(rows) != 4:
        raise SystemExit(f"{COUNTING}/README.md has {len(rows)} rows of counts, and not 4: was the record made anew?")
    return sum(int(count) for row in rows for count in row)


def frames(
    method: str, workers: int, key: str = "error_over_serial", file: str = "table.json", task: str = "frames-sgd"
) -> float:
    """Of a network that hears which state a frame of speech is in, over one worker's."""
    return cell(FRAMES, file, key, task=task, method=method, workers=workers)
