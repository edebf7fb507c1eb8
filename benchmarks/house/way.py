# SPDX-License-Identifier: Apache-2.0
"""How far is the way of one exchange through the source? Traces what two virtual workers run, function by function.

    python benchmarks/house/way.py [--show exchange|quiet_step|attach|share|push]

Counts what worker 0's thread runs under `src/paceline` (`sys.setprofile`): files that it visits, calls, changes of
file between one call and the next, and the depth of frames. The last line is a JSON object: `exchange_files`,
`exchange_calls`, `exchange_changes`, `exchange_frames` (the first exchange under `bmuf`), `quiet_step_files` (a step
without an exchange), `attach_files`, `attach_changes`, `share_files`, `share_changes` (the first batch of `run.share`),
`push_files`, `push_changes` (a push of `dc_asgd`), and more. `--show` prints a way call by call.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

PACKAGE = str(Path(paceline.__file__).parent) + "/"


@dataclass
class Way:
    """The calls of one way, in order.

    Attributes:
        calls: file and function of each call.
        frames: the most frames of the package that were open at once.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    @property
    def files(self) -> int:
        """Files that the way visits."""
        return len({file for file, _ in self.calls})

    @property
    def changes(self) -> int:
        """How often the next call is in another file."""
        return sum(a[0] != b[0] for a, b in zip(self.calls, self.calls[1:], strict=False))

    @property
    def frames(self) -> int:
        """The most frames of the package that were open at once."""
        return max(self.depths, default=0)

    def figures(self, name: str) -> dict[str, int]:
        """As in the JSON object."""
        return {
            f"{name}_files": self.files,
            f"{name}_calls": len(self.calls),
            f"{name}_changes": self.changes,
            f"{name}_frames": self.frames,
        }


@contextmanager
def traced(way: Way) -> Iterator[None]:
    """Note the calls of this thread."""
    depth = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or frame.f_code.co_name.startswith("<"):
            return
        if event == "call":
            depth += 1
            way.calls.append((name.removeprefix(PACKAGE), frame.f_code.co_qualname))
            way.depths.append(depth)
        elif event == "return":
            depth = max(depth - 1, 0)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def train(rule: str, ways: dict[str, Way], steps: dict[int, str], **options: Any) -> Callable[[], None]:
    """A worker's program, whose rank 0 traces `attach`, the first batch, and the steps with these numbers."""

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
        loader = DataLoader(data, batch_size=4, shuffle=True)
        attach = Way()
        with traced(attach):
            run = paceline.attach(model, optimizer, rule, **options)
        rank = run.world.rank
        mine = ways if rank == 0 else {}
        mine["attach"] = attach
        with run:
            share = Way()
            with traced(share):
                batches = iter(run.share(loader))
                batch = next(batches)
            mine["share"] = share
            for step in range(1, max(steps) + 1):
                x, y = batch
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                way = Way()
                with traced(way):
                    optimizer.step()
                if step in steps:
                    mine[steps[step]] = way
                batch = next(batches)

    return program


def measure() -> dict[str, Way]:
    """All ways, by name; what a first call imports has been imported before."""
    for rule in ("bmuf", "dc_asgd"):
        paceline.simulate(train(rule, {}, {2: "warm"}), workers=2)
    ways: dict[str, Way] = {}
    blocks = train("bmuf", ways, {3: "quiet_step", 4: "exchange"}, period=4)
    paceline.simulate(blocks, workers=2)
    pushes: dict[str, Way] = {}
    paceline.simulate(train("dc_asgd", pushes, {2: "push"}), workers=2)
    return ways | {"push": pushes["push"]}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", help="print this way call by call")
    parser.add_argument("--quick", action="store_true", help="as without it")
    given = parser.parse_args()
    ways = measure()
    if given.show:
        last = ""
        for (file, name), depth in zip(ways[given.show].calls, ways[given.show].depths, strict=True):
            print(f"{'' if file == last else file:52}{'  ' * depth}{name}")
            last = file
    figures: dict[str, int] = {}
    for name, way in ways.items():
        print(f"{name:12} {way.files:4} files {len(way.calls):5} calls {way.changes:5} changes {way.frames:3} frames")
        figures |= way.figures(name)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
