# SPDX-License-Identifier: Apache-2.0
"""What a re-allocation of LightRNN's table costs and saves: against chance, the greedy heuristic and the exact optimum.

The costs are made up, but look like real ones: counts after Zipf's law, states in clusters, with the noise of as many
positions as the word has, output vectors and biases drawn at random, and normalisers that belong to them. They go
through `FactoredCosts`, as in training.

    python benchmarks/lightrnn_allocation.py --words 4000
    python benchmarks/lightrnn_allocation.py --words 1000000

One line of JSON: seconds of clock and of all processor cores, costs in nats a position, the gap to the exact optimum
where the words are at most `--exact` (relative to it, and relative to the distance from a random table to it), memory
in MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from types import SimpleNamespace

import _quick
import numpy as np
import torch

from paceline_lightrnn import CostSource, FactoredCosts, WordTable, reallocate


def make_costs(words: int, rows: int, columns: int, dimension: int, seed: int) -> CostSource:
    """Costs of a made-up text of about `words * log(words)` positions."""
    torch.manual_seed(seed)
    costs = FactoredCosts(words, dimension)
    count = torch.clamp(torch.round(words / (torch.randperm(words) + 2.7)), min=1)
    costs.count.copy_(count)
    outputs = {}
    sides = (("row", rows, costs.row, costs.row_norm), ("column", columns, costs.column, costs.column_norm))
    for name, lines, state, norm in sides:
        out, bias = torch.randn(lines, dimension) * 3 / dimension**0.5, torch.randn(lines) * 0.7
        outputs |= {f"{name}_out": out, f"{name}_bias": bias}
        centres = torch.randn(max(8, int(words**0.5)), dimension)
        for begin in range(0, words, 10_000):
            n = count[begin : begin + 10_000, None]
            mean = centres[torch.randint(len(centres), (len(n),))] + 0.7 * torch.randn(len(n), dimension)
            mean += torch.randn(len(n), dimension) / n.sqrt()
            one = mean + 0.7 * torch.randn(len(n), dimension)
            state[begin : begin + 10_000] = mean * n
            norm[begin : begin + 10_000] = (one @ out.T + bias).logsumexp(1) * n[:, 0]
    return costs.source(SimpleNamespace(**outputs))  # type: ignore[arg-type]


def greedy(costs: CostSource) -> np.ndarray:
    """Cells by the heuristic of the published code: rows first, word after word, then columns inside each row.

    The words come in the order of what they would lose by chance: the mean of their costs less the least of them.
    """
    row = _greedy_lines(costs.row_costs, np.arange(costs.words), costs.rows, costs.columns)
    column = np.empty(costs.words, np.int64)
    for i in range(costs.rows):
        inside = np.flatnonzero(row == i)
        column[inside] = _greedy_lines(costs.column_costs, inside, costs.columns, 1)
    return row * costs.columns + column


def _greedy_lines(side: Callable[[np.ndarray], np.ndarray], words: np.ndarray, lines: int, capacity: int) -> np.ndarray:
    priority = np.concatenate([_priority(side(some)) for some in _cut(words)])
    line, room, closed = np.empty(len(words), np.int64), np.full(lines, capacity), np.zeros(lines, np.float32)
    for at in _cut(np.argsort(-priority, kind="stable")):
        for k, cost in zip(at, side(words[at]), strict=True):
            best = int((cost + closed).argmin())
            line[k] = best
            room[best] -= 1
            if room[best] == 0:
                closed[best] = np.inf
    return line


def _cut(words: np.ndarray) -> list[np.ndarray]:
    return np.array_split(words, len(words) // 4096 + 1)


def _priority(cost: np.ndarray) -> np.ndarray:
    return cost.mean(1) - cost.min(1)


def price(costs: CostSource, cells: np.ndarray) -> float:
    """What the words cost in these cells."""
    total = 0.0
    for words in _cut(np.arange(costs.words)):
        i, j = np.divmod(cells[words], costs.columns)
        each = np.arange(len(words))
        total += float(costs.row_costs(words)[each, i].sum(dtype=np.float64))
        total += float(costs.column_costs(words)[each, j].sum(dtype=np.float64))
    return total


def measure(words: int, dimension: int, seed: int, exact: int) -> dict[str, object]:
    """One re-allocation from a random table, and what it is compared with."""
    table = WordTable.random(words, seed=seed)
    costs = make_costs(words, table.rows, table.columns, dimension, seed)
    count = float(costs._sums.count.sum())  # type: ignore[attr-defined]
    clock, cpu = time.perf_counter(), time.process_time()
    found = reallocate(costs, table, seed=seed, exact_words=0)
    clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begun = time.perf_counter()
    by_greed = price(costs, greedy(costs))
    greedy_seconds = time.perf_counter() - begun
    line = {"words": words, "rows": table.rows, "columns": table.columns, "dimension": dimension, "seed": seed}
    line |= {"seconds": round(clock, 2), "cpu_seconds": round(cpu, 2), "memory_mb": round(memory)}
    line |= {"greedy_seconds": round(greedy_seconds, 2), "threads": torch.get_num_threads()}
    named = {"before": found.before, "greedy": by_greed, "after": found.after, "lower_bound": found.lower_bound}
    if words <= exact:
        best = reallocate(costs, table, exact_words=exact)
        named["exact"] = best.after
        line["exact_seconds"] = round(best.seconds, 2)
    line |= {name: round(value / count, 5) for name, value in named.items()}
    goal = named.get("exact", found.lower_bound)
    name = "exact" if "exact" in named else "lower_bound"
    for way in ("after", "greedy"):
        line[f"{way}_over_{name}"] = round(named[way] / goal - 1, 5)
        line[f"{way}_over_{name}_of_random"] = round((named[way] - goal) / (found.before - goal), 5)
    return line


def main() -> None:
    """Read the arguments and print a line of JSON for each vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--dimension", type=int, default=64)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--exact", type=int, default=5000, help="find the exact optimum, too, up to so many words")
    given = _quick.parse(parser, words=[400])
    for words in given.words:
        for seed in given.seed:
            print(json.dumps(measure(words, given.dimension, seed, given.exact)), flush=True)


if __name__ == "__main__":
    main()
