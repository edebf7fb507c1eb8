# SPDX-License-Identifier: Apache-2.0
"""How the distance from one worker falls with the data: tables of `blocks.py` of several sizes, side by side.

    python benchmarks/quality/blocks_by_data.py data-*.json [--workers 64] [--goal .01] [--plot FILE]

Each file is the last line of `blocks.py table` with another `--minibatches`. Prints the distance of every method from
one worker with the same data, and, by a straight line between logarithms, after how many blocks it comes below the
goal. The last line is a JSON object: `blocks`, `over` (method -> distances, null where it diverged or was not tried)
and `crosses` (method -> blocks, null where that was not seen).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
from _block_plots import STYLES
from matplotlib.figure import Figure


def distances(tables: list[dict[str, Any]], workers: int) -> tuple[list[int], dict[str, list[float | None]]]:
    """Blocks of each table, and each method's loss over that of one worker, less 1."""
    tables = sorted(tables, key=lambda table: int(table["minibatches"]))
    blocks = [int(table["minibatches"]) // (int(table["period"]) * workers) for table in tables]
    over: dict[str, list[float | None]] = {}
    for method in dict.fromkeys(name for table in tables for name in table["loss"]):
        losses = [table["loss"].get(method, {}).get(str(workers)) for table in tables]
        over[method] = [
            None if loss is None else loss / table["serial"] - 1 for loss, table in zip(losses, tables, strict=True)
        ]
    return blocks, over


def crossing(blocks: list[int], over: list[float | None], goal: float) -> float | None:
    """After how many blocks the distance comes to the goal; None where it is not seen to cross it."""
    known = [(n, value) for n, value in zip(blocks, over, strict=True) if value is not None]
    for (n, before), (m, after) in pairwise(known):
        if before > goal >= after > 0:
            part = math.log(before / goal) / math.log(before / after)
            return float(n * (m / n) ** part)
    return None


def draw(blocks: list[int], over: dict[str, list[float | None]], goal: float, workers: int, path: Path) -> None:
    """Distance in per cent by blocks, both as logarithms."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for method, values in over.items():
        color, line = STYLES.get(method, ("C7", "-"))
        seen = [(n, 100 * value) for n, value in zip(blocks, values, strict=True) if value is not None and value > 0]
        axes.plot(*zip(*seen, strict=True), color=color, linestyle=line, marker="o", label=method.replace("_", " "))
    axes.axhline(100 * goal, color="black", linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(blocks, [f"{n:,}" for n in blocks])
    ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20) if tick >= 50 * goal]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"blocks ({workers} workers)")
    axes.set_ylabel("loss over that of one worker\nwith the same data, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Compare the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+", help="JSON of `blocks.py table`")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--goal", type=float, default=0.01, help="distance as a part of one worker's loss")
    parser.add_argument("--plot", type=Path)
    args = _quick.parse(parser)  # quick as it is
    blocks, over = distances([json.loads(path.read_text(encoding="utf-8")) for path in args.tables], args.workers)
    print(f"{'loss over one worker':22}" + "".join(f"{n:>10,}" for n in blocks) + " blocks")
    for method, values in over.items():
        print(f"{method:22}" + "".join("         -" if value is None else f"{100 * value:+9.1f}%" for value in values))
    crosses = {method: crossing(blocks, values, args.goal) for method, values in over.items()}
    for method, where in crosses.items():
        told = "is not seen to" if where is None else f"after about {where:,.0f} blocks"
        print(f"{method}: below {args.goal:.0%} {told}")
    if args.plot is not None:
        draw(blocks, over, args.goal, args.workers, args.plot)
    print(json.dumps({"workers": args.workers, "blocks": blocks, "over": over, "crosses": crosses}))


if __name__ == "__main__":
    main()
