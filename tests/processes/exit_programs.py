# SPDX-License-Identifier: Apache-2.0
"""A program that some workers leave in the middle of a pass: `python -m tests.processes.exit_programs DOOR DIRECTORY
RULE WAY WHO`, where DOOR is `two` (lines) or `zero`, WAY is one of `WAYS`, and WHO leaves: a rank or `all`. Behind
`kept_` the program ends while a cycle of references holds the iterator of its pass, the model and a graph. With the way
`reads_ahead` none leaves, and a thread reads the batches."""

from __future__ import annotations

import builtins
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 24
"""Of each worker in a pass."""


class LeaveError(Exception):
    """Ends a pass, and is caught by the program."""


def raises(error: BaseException) -> None:
    raise error


WAYS: dict[str, Callable[[], Any]] = {
    "exit0": lambda: sys.exit(0),
    "exit3": lambda: sys.exit(3),
    "exit_text": lambda: sys.exit("the data are bad"),
    "quit": lambda: builtins.quit(),
    "quit3": lambda: builtins.quit(3),
    "system_exit0": partial(raises, SystemExit(0)),
    "system_exit3": partial(raises, SystemExit(3)),
    "os_exit0": lambda: os._exit(0),
    "os_exit3": lambda: os._exit(3),
    "error": partial(raises, ValueError("a bad sample")),
    "swallowed": partial(raises, LeaveError()),
    "interrupt": partial(raises, KeyboardInterrupt()),
    "break": lambda: True,
    "generator": lambda: None,
    "thread_exit0": lambda: sys.exit(0),
    "thread_exit3": lambda: sys.exit(3),
}


def train(attach: Callable[[nn.Module, Any, Any], Any], way: str, leaves: bool) -> None:
    """Two passes; who `leaves` does so in the first, after 5 batches."""
    torch.manual_seed(0)
    x = torch.randn(2 * BATCHES * 4, 3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = attach(model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True))
    batches = read_ahead if way == "reads_ahead" else iter
    if way.startswith("kept_"):
        way = way.removeprefix("kept_")
        batches = Cycle(model, optimizer).begin
    try:
        for epoch in range(2):
            for batch, (a, b) in enumerate(given(batches(loader), leaves and way == "generator" and not epoch)):
                optimizer.zero_grad()
                (model(a) - b).square().mean().backward()
                optimizer.step()
                if leaves and (epoch, batch) == (0, 4) and way in WAYS and WAYS[way]():
                    return
    except (LeaveError, KeyboardInterrupt):
        print("left", flush=True)


class Cycle:
    """Holds what only the garbage collector can drop, as the interpreter ends."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.itself, self.model, self.optimizer = self, model, optimizer

    def begin(self, loader: Iterable[Any]) -> Iterator[Any]:
        self.iterator = iter(loader)
        for batch in self.iterator:
            self.graph = self.model(batch[0]).sum()
            yield batch


def read_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches, which a thread reads."""
    ready: queue.Queue[Any] = queue.Queue(4)

    def read() -> None:
        for batch in loader:
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=read, name="reader", daemon=True).start()
    return iter(ready.get, None)


def given(loader: Iterable[Any], ends: bool) -> Iterator[Any]:
    """The batches; `ends` swallows what goes wrong after 5 of them."""
    try:
        for number, batch in enumerate(loader):
            if ends and number == 5:
                raise ValueError("a bad sample")
            yield batch
    except ValueError:
        return


def run_here(attach: Callable[[nn.Module, Any, Any], Any], way: str, who: str) -> None:
    leaves = who in ("all", os.environ["TEST_RANK"])
    if not way.startswith("thread"):
        train(attach, way, leaves)
        return
    thread = threading.Thread(target=train, args=(attach, way, leaves))
    thread.start()
    thread.join()


def main(door: str, directory: str, rule: str, way: str, who: str) -> None:
    os.environ.update(PACELINE_RULE=rule, PACELINE_TIMEOUT_S="20", PACELINE_LOG=f"{directory}/log")
    os.environ["TEST_RANK"] = os.environ["RANK"]
    if door == "zero":
        from paceline_plugins.zero import program

        program.main([__file__, "unchanged", way, who])
        return
    import site

    import paceline

    del site
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_here(lambda model, optimizer, loader: paceline.attach(model, optimizer).share(loader), way, who)


if __name__ == "__main__":
    if sys.argv[1] == "unchanged":
        run_here(lambda model, optimizer, loader: loader, *sys.argv[2:])
    else:
        assert Path(sys.argv[2]).is_dir()
        main(*sys.argv[1:])
