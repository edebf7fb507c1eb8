# SPDX-License-Identifier: Apache-2.0
"""The figures of `docs/evidence/claims.md` a second time, from each seed's value and by the page's words alone.

    python benchmarks/seeds/recompute.py [--quick]

It shares no code with `seeds.py` and uses no part of paceline; `recompute.json` has an expression for each figure. A
figure agrees when its row on the page has that number to its last digit; a computed speed may be off by 1 %, as the
page's formula is shorter than the planner's. The last line is a JSON object: `rows`, `of`, `reached` and `defended` as
counted on the page; `figures`, `recomputed` (the share that agrees), `differ` (figure -> what comes out here),
`not_kept` (those without a value of each seed), `unmarked` (those of them without the page's dagger), and `unfair`
(rows of the articles whose base line had fewer settings than ours).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from functools import cache
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick

ROOT = Path(__file__).resolve().parents[2]
STEP_S, SIZE, SPREAD, HOP_S, RATE = 0.25, 10e6, 0.01, 50e-6, 1.25e9 * 1448 / 1538
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
SHOWN = {"share": 100.0}
"""What a unit's figure is multiplied by on the page."""


@cache
def raw(record: str, name: str) -> Any:
    """A JSON file of the record of this name; of one with a JSON object a line, their list."""
    (folder,) = (ROOT / "records").glob(f"2026-??-??_{record}")
    text = (folder / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def mean(values: Any) -> float:
    """Of numbers."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


def pick(record: str, name: str, path: str, /, **where: Any) -> list[float]:
    """The number at a path of every row that has these values, in the order of their seeds."""
    rows = raw(record, name)
    rows = (
        rows if isinstance(rows, list) else next(rows[key] for key in ("trainings", "written", "runs") if key in rows)
    )
    rows = [row for row in rows if all(row[key] == value for key, value in where.items())]
    found = sorted(rows, key=lambda row: row.get("seed", 0))
    for key in path.split("/"):
        found = [row[int(key) if isinstance(row, list) else key] for row in found]
    return found


# -- speeds, by the page's formulas


@cache
def largest(n: int) -> float:
    """Mean of the largest of n standard normal draws."""
    below = [NormalDist().cdf(z / 200) ** n for z in range(-1600, 1601)]
    return sum((z + 0.5) / 200 * (below[z + 1601] - below[z + 1600]) for z in range(-1600, 1600))


def wire_s(n: int, size: float) -> float:
    """Seconds of the bytes of an exchange."""
    return 2 * (n - 1) / n * 4 * size / RATE


def blocks(n: int, period: int, size: float = SIZE, step_s: float = STEP_S, moments: int = 0) -> float:
    """Workers that meet after each block."""
    block_s = step_s * (period + SPREAD * math.sqrt(period) * largest(n))
    return n * step_s * period / (block_s + wire_s(n, size * (1 + moments)) + 2 * (n - 1) * HOP_S)


def late(n: int) -> float:
    """Asynchronous workers that wait for their answer."""
    return n * STEP_S / (STEP_S + wire_s(n, SIZE) + 2 * HOP_S)


def sync(n: int, size: float = SIZE, step_s: float = STEP_S) -> float:
    """Gradients that travel during the backward pass, but for the last MiB."""
    left_s = max(0.0, wire_s(n, size) - step_s * 2 / 3) + wire_s(n, 2**18) + 3 * (n - 1) * HOP_S
    return n * step_s / (step_s * (1 + SPREAD * largest(n)) + left_s)


def ddl(spread: float) -> float:
    """256 GPUs, 0.2 s a step, 5 us a hop, gradients that travel during the backward pass."""
    return 1 / (1 + spread * largest(256) + 3 * 255 * 5e-6 / 0.2)


# -- losses over one worker's


def quality(record: str, name: str, method: str, n: int, task: str, key: str = "quality") -> float:
    """Each seed's value beside one worker's."""
    table = raw(record, name)
    (cell,) = (c for c in table["cells"] if (c["task"], c["method"], c["workers"]) == (task, method, n))
    mine, alone = cell["each"]["1"][key], table["serial"][task]["1"][key]
    assert len(mine) == len(alone)
    return mean(mine) / mean(alone) - 1


def times_as_soon(record: str, name: str, method: str, n: int, task: str, speed: float) -> float:
    """One worker's time to this loss, on a line of log loss over log time from half of its samples, over ours."""
    table = raw(record, name)
    half, whole = (mean(table["serial"][task][share]["quality"]) for share in ("0.5", "1"))
    loss = whole * (1 + quality(record, name, method, n, task))
    if loss > half:
        raise ValueError("worse than one worker with half of the samples")
    return speed * 0.5 ** max(0.0, 1 - math.log(half / loss) / math.log(half / whole))


def characters(method: str, n: int, name: str = "table.json") -> float:
    """The record of blocks."""
    return mean(raw("blocks", name)["each"][method][str(n)]) / mean(raw("blocks", name)["serial_each"]) - 1


def line(method: str, n: int, over: str, name: str = "table.json") -> float:
    """Errors on lines of text: of three seeds the record keeps the least, the mean and the most."""

    def errors(method: str, n: int) -> float:
        (cell,) = (c for c in raw("lines", name)["cells"] if (c["method"], c["workers"]) == (method, n))
        middle = 3 * cell["error"] - cell["least"] - cell["most"]
        assert cell["least"] - 1e-12 <= middle <= cell["most"] + 1e-12
        return mean([cell["least"], middle, cell["most"]])

    return errors(method, n) / errors(over, 1 if over.startswith("serial") else n) - 1


def tool(rule: str, n: int) -> tuple[float, float]:
    """The best rate of a C++ tool on n workers, and its errors over those of the tool alone at its own best."""
    table = raw("c_tool", "workers.json")
    alone = min(mean(seeds) for seeds in table["error_alone"].values())
    errors, rate = min((mean(seeds), rate) for rate, seeds in table["error"][rule][str(n)].items())
    return float(rate), errors / alone - 1


def won_back(rate: float, method: str, rule: str = "") -> float:
    """Share of what `asgd` loses that a way to train a CNN with 8 late workers wins back."""
    lines = [t for t in raw("delay_compensation", "table.json")["trainings"] if t["minibatches"] == 20_480]

    def loss(method: str, workers: int, rule: str = "") -> float:
        ways = [t for t in lines if (t["method"], t["workers"], t["rate"]) == (method, workers, rate)]
        found = {t["seed"]: t["loss"] for t in ways if rule in t["rule"]}
        assert set(found) == {0, 1, 2}
        return mean(found.values())

    alone, plain = loss("one worker", 1), loss("asgd", 8)
    return (plain - loss(method, 8, rule)) / (plain - alone)


# -- the page


def on_page() -> dict[str, list[str]]:
    """The cells of each row, by its key."""
    text = (ROOT / "docs" / "evidence" / "claims.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {row[0]: row[1:] for row in rows if row[0]}


def agrees(figure: float, cells: list[str], slack: float) -> bool:
    """Whether a number of the row is this figure, to its last digit or within a share of it."""
    for word in NUMBER.findall(" ".join(cells).replace(",", "")):
        digits = len(word.partition(".")[2])
        if abs(float(word) - figure) <= max(0.5000001 * 10**-digits, slack * abs(figure)):
            return True
    return False


def compared() -> dict[str, Any]:
    """The page beside what comes out here."""
    here = Path(__file__)
    own = json.loads(here.with_suffix(".json").read_text(encoding="utf-8"))
    claims = json.loads(here.with_name("claims.json").read_text(encoding="utf-8"))
    page, known = on_page(), {**globals(), "median": median}
    differ, missing, unmarked, figures = dict[str, Any](), list[str](), list[str](), 0
    for claim in claims:
        cells = page[claim["key"]]
        for name, (_, unit) in claim["figures"].items():
            figure, figures = f"{claim['key']}.{name}", figures + 1
            try:
                value = SHOWN.get(unit, 1.0) * eval(own[figure], known)
            except KeyError:  # no value of each seed, or no expression
                missing.append(figure)
                unmarked += [figure] * ("†" not in " ".join(cells))
                continue
            ours = cells[1 if claim["kind"] == "own" else 2 : -1]
            if not agrees(value, ours, 0.01 if claim["kind"] == "computed" or unit == "x" else 0.0):
                differ[figure] = round(value, 5)
    articles = {claim["key"]: claim for claim in claims if claim["kind"] != "own"}
    verdicts = [page[key][4] for key in articles]
    pairs = {key: claim["rates"] for key, claim in articles.items() if "rates" in claim}
    return {
        "rows": len(articles),
        "of": len([verdict for verdict in verdicts if verdict]),
        "reached": len([verdict for verdict in verdicts if verdict in ("yes", "**defended**")]),
        "defended": verdicts.count("**defended**"),
        "figures": figures,
        "recomputed": round(1 - (len(missing) + len(differ)) / figures, 4),
        "differ": differ,
        "not_kept": missing,
        "unmarked": unmarked,
        "unfair": [key for key, (base, ours) in pairs.items() if base < ours],
    }


def main() -> None:
    """Compare, and print what differs."""
    _quick.parse(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter))
    print(json.dumps(compared()))


if __name__ == "__main__":
    main()
