# SPDX-License-Identifier: Apache-2.0
"""Run a function or an unchanged script with N virtual workers (:mod:`paceline.communication.virtual.transport`)."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from paceline.communication import virtual
from paceline.communication.virtual.clock import Clock
from paceline.forecast.sim.process_isolation import Start, isolated_script, shared_process

Result = TypeVar("Result")


class _Prefixed:
    """A text stream that puts `[rank]` before every line."""

    def __init__(self, stream: TextIO, rank: int) -> None:
        self._stream, self._prefix, self._at_start = stream, f"[{rank}] ", True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            self._stream.write((self._prefix if self._at_start else "") + line)
            self._at_start = line.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def simulate(
    target: Callable[[], Result] | str | Path,
    workers: int,
    arguments: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
    clock: Clock | None = None,
) -> list[Result | None]:
    """Run `target` with `workers` virtual workers in this process; every run repeats bit for bit.

    Each worker has its own thread, model, random generators and rank. One runs at a time, so the wall time is that of
    all minibatches in sequence. Inside, `paceline.attach` finds the virtual cluster by itself.

    >>> import torch, paceline
    >>> def train() -> float:
    ...     model = torch.nn.Linear(1, 1, bias=False)
    ...     torch.nn.init.zeros_(model.weight)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     with paceline.attach(model, optimizer, "averaging", period=2) as run:
    ...         for _ in range(4):
    ...             model.weight.grad = torch.full_like(model.weight, run.world.rank)
    ...             optimizer.step()
    ...     return round(model.weight.item(), 4)
    >>> paceline.simulate(train, workers=3)  # gradients 0, 1 and 2: the mean is 1
    [-0.4, -0.4, -0.4]

    Args:
        target: a function without arguments, called once in each worker; or the path of a script, run in each worker as
            `__main__` with `arguments` as its command line. Modules that a script imports are loaded only once.
        workers: N, at least 1.
        arguments: the script's command line.
        hosts: a host name for each worker, for hierarchical topologies; by default all are on this host.
        clock: durations of computing and messages (:class:`paceline.forecast.sim.Clock`), which order the events of
            asynchronous rules; by default every minibatch takes a second and messages take no time.

    Returns:
        The function's result in each worker, in rank order; for a script, its global names.

    Raises:
        The exception of the first worker that fails.
    """
    if callable(target):
        if arguments:
            raise ValueError("arguments are for scripts; bind a function's own with functools.partial")
        return list(virtual.run(workers, target, hosts, clock))
    return list(run_script(Path(target), workers, arguments, _prefixed, hosts, clock))


WorkerContext = Callable[[virtual.VirtualTransport], AbstractContextManager[Any]]


def run_script(
    path: Path,
    workers: int,
    arguments: Sequence[str],
    around: WorkerContext,
    hosts: Sequence[str] | None = None,
    clock: Clock | None = None,
) -> Sequence[Any]:
    """Run a script in each of `workers` virtual workers, each with its own process state.

    Args:
        path: of the script.
        workers: N.
        arguments: the script's command line.
        around: makes the context in which a worker's script runs, from the worker's transport.
        hosts: as for `simulate`.
        clock: as for `simulate`.

    Returns:
        Each worker's global names, in rank order.

    Raises:
        ValueError: there is no such script.
        UnsupportedError: the script changes process state that virtual workers share
            (:mod:`paceline.forecast.sim.process_isolation`).
        The exception of the first worker that fails.
    """
    if not path.is_file():
        raise ValueError(f"there is no script {path}")
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as Python does for a script

    def body(start: Start) -> dict[str, Any]:
        transport = virtual.current()
        assert transport is not None
        with around(transport), isolated_script(transport, start):
            return _run_script(code, path, arguments)

    try:
        with shared_process() as start:
            return virtual.run(workers, lambda: body(start), hosts, clock)
    finally:
        sys.path.remove(folder)


@contextlib.contextmanager
def _prefixed(transport: virtual.VirtualTransport) -> Iterator[None]:
    """All workers print here, each line with the rank in front."""
    sys.stdout = _Prefixed(sys.stdout, transport.world.rank)
    yield


def _run_script(code: types.CodeType, path: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the script as the worker's `__main__`; the scheduler switches all state that is set here."""
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    sys.modules["__main__"] = main
    sys.argv = [str(path), *arguments]
    exec(code, main.__dict__)
    return main.__dict__
