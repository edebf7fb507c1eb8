# SPDX-License-Identifier: Apache-2.0
"""Where the time of an exchange of virtual workers goes: a worker's processor milliseconds in each part of it.

    python records/2026-11-22_simulator/parts.py [workers] [steps] [rounds]

Prints a JSON object: `parts` (one inside the other as they are called, the median over the rounds), `operations` (the
same passes over the same memory by torch alone, in one loop over the workers) and `turn` (of one exchange of eleven
integers, which passes the turn to the next worker).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / "benchmarks" / folder) for folder in ("speed", "common"))

import torch
from sim import Task

from paceline.communication.virtual import transport as virtual
from paceline.run.hooks import StepHooks
from paceline.update.engine.blocks.fragment import BlockUpdate
from paceline.update.engine.blocks.model import BlockExchanges
from paceline.update.engine.blocks.outer_state import OuterStateChunk

PERIOD, ELEMENTS = 8, 284_682  # of the model of width 512
PARTS: list[tuple[type, str]] = [
    (StepHooks, "_after_step"),
    (BlockExchanges, "_end_block"),
    (BlockUpdate, "begin"),
    (BlockUpdate, "_header"),
    (virtual.VirtualTransport, "all_gather"),
    (OuterStateChunk, "fill"),
    (virtual.VirtualTransport, "all_reduce"),
    (BlockUpdate, "land"),
    (OuterStateChunk, "land"),
]
spent: dict[str, float] = defaultdict(float)


def watch(owner: type, name: str) -> None:
    """Add up what a method takes in its thread."""
    method, key = getattr(owner, name), f"{owner.__name__}.{name}"

    def watched(*arguments: Any, **more: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*arguments, **more)
        finally:
            spent[key] += time.thread_time() - began

    setattr(owner, name, watched)


def operations(workers: int) -> Callable[[], None]:
    """The passes of one exchange of all workers, without anything else."""
    states = [[torch.randn(ELEMENTS) for _ in range(4)] for _ in range(workers)]
    total, scratch = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)

    def run() -> None:
        total.zero_()
        for parameters, anchor, delta, wire in states:
            parameters.sum()
            torch.add(anchor, delta, alpha=0.5, out=wire)
            torch.sub(parameters, wire, out=wire)
            total.add_(wire)
        for parameters, anchor, delta, wire in states:
            wire.copy_(total)
            torch.div(wire, workers, out=scratch)
            delta.mul_(0.5).add_(scratch, alpha=0.1)
            anchor.add_(delta)
            torch.add(anchor, delta, alpha=0.5, out=scratch)
            scratch.view(torch.int32).sum()
            parameters.copy_(scratch)

    return run


def turns(workers: int, count: int) -> None:
    """Exchanges of headers alone."""

    def program() -> None:
        connection = virtual.current()
        assert connection is not None
        x, rows = torch.zeros(11, dtype=torch.int64), torch.zeros(workers, 11, dtype=torch.int64)
        for _ in range(count):
            connection.all_gather(rows, x)

    virtual.run(workers, program)


def processor_ms(action: Callable[[], object]) -> float:
    """Of this process."""
    began = time.process_time()
    action()
    return 1e3 * (time.process_time() - began)


def main() -> None:
    """Measure in rounds, and print the medians."""
    workers, steps, rounds = (int(text) for text in (sys.argv[1:] + ["32", "64", "5"][len(sys.argv) - 1 :]))
    torch.set_num_threads(1)
    passes, task = operations(workers), Task(workers, steps, 512, 64)
    found: dict[str, list[float]] = defaultdict(list)
    for owner, name in PARTS:
        watch(owner, name)
    for turn in range(rounds + 1):
        spent.clear()
        task.virtual(f"bmuf(period={PERIOD})")
        parts = {name: 1e3 * seconds / (workers * steps / PERIOD) for name, seconds in spent.items()}
        parts["operations"] = processor_ms(passes) / workers
        parts["turn"] = processor_ms(lambda: turns(workers, 50)) / workers / 50
        for name, ms in parts.items() if turn else ():
            found[name].append(ms)
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    alone = {name: medians.pop(name) for name in ("operations", "turn")}
    print(json.dumps({"parts": medians, **alone, "workers": workers, "steps": steps, "rounds": rounds}))


if __name__ == "__main__":
    main()
