# SPDX-License-Identifier: Apache-2.0
"""What it costs to measure how many workers all are worth.

Two processes hold a 100 MB fp32 model (25 tensors of 4 MB) and make `bmuf` synchronisations of it over loopback, in
turn with the norms of the mean displacement taken and without. The norms of the workers' own displacements are taken
either way: the guard against outliers needs them. The figure is the median difference over the median of those without.

    python benchmarks/quality_meter.py [--repeats 30]

The last line is a JSON object: `cost` (in parts of a synchronisation) and `effective` (what was measured, of 2).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics

import _quick
import torch
import torch.distributed as dist
from _workers import answer, is_worker, launch
from sync_cost import attached, timed

from paceline.update.engine.blocks.outer_state import ParameterState

WARM = 4
"""Pairs before the first that counts."""


def worker(repeats: int) -> None:
    """One rank: synchronisations with and without, in turn."""
    model, optimizer, run = attached()
    states = [one for one in gc.get_objects() if isinstance(one, ParameterState)]
    rows: dict[bool, list[float]] = {True: [], False: []}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for repeat in range(repeats + WARM):
        for measured in (True, False) if repeat % 2 else (False, True):
            with torch.no_grad():
                for weight in model.weights:
                    weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.01)
            for state in states:
                state.sum_mean_norms()
                state.mean_norms = {} if measured else None
            rows[measured].append(timed(optimizer.step))  # no gradients: the step is the synchronisation
    effective = states[0]._numbers.diversity.effective
    run.close()
    pairs = list(zip(rows[True], rows[False], strict=True))[WARM:]
    more = statistics.median(one - other for one, other in pairs)
    answer({"more_s": more, "without_s": statistics.median(other for _, other in pairs), "effective": effective})


def main() -> None:
    """Run it and print the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    options = _quick.parse(parser, repeats=2)
    if is_worker():
        worker(options.repeats)
        return
    found = launch(__file__, ["--repeats", str(options.repeats)], 2, 600)
    print(f"without: {1e3 * found['without_s']:.1f} ms; measuring adds {1e3 * found['more_s']:.2f} ms")
    cost = found["more_s"] / found["without_s"]
    print(json.dumps({"cost": round(cost, 4), "effective": found["effective"] and round(found["effective"], 3)}))


if __name__ == "__main__":
    main()
