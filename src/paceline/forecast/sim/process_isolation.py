# SPDX-License-Identifier: Apache-2.0
"""Process state of each of N virtual workers, which share one process.

=============================================  ========================================================================
random generators, `sys.argv`, `sys.stdout`,   switched by :mod:`paceline.communication.virtual.transport`
the module `__main__`
working directory, `sys.stderr`                switched by :class:`IsolatedProcess`
`RANK`, `WORLD_SIZE`                           each worker's own; `LOCAL_RANK` is 0 for all, since there is one device
`atexit.register` in the script                called when the worker's script has ended, last one first
handlers of signals that ask a process to stop  kept, never called: a signal ends the simulation as a whole
handlers of other signals                      refused
`torch.distributed.init_process_group`         refused: paceline finds the virtual cluster by itself
`torch.set_num_interop_threads`                the first worker's call holds; the same number again is no error
an exchange inside an `import`                 refused: other workers would wait for the import for ever
number of threads, default dtype, environment  shared: all workers run the same script and set the same
imported modules                               loaded once for all
=============================================  ========================================================================
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

import torch

from paceline.communication import virtual
from paceline.errors import UnsupportedError

COORDINATES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE}
"""Signals that ask a process to stop or save; a simulation does not call their handlers."""
Start = tuple[str, TextIO]
IMPORTING = "<frozen importlib._bootstrap>"


class IsolatedProcess:
    """The working directory, the standard error and the rank variables of one virtual worker.

    Args:
        rank: the worker.
        size: number of workers.
        start: initial directory and standard error.

    Attributes:
        says_rank: whether the environment has the rank; false for zero lines, where the program sees one device.
    """

    says_rank = True

    def __init__(self, rank: int, size: int, start: Start) -> None:
        self.rank, self.size = rank, size
        self._directory, self._stderr = start
        self.put()

    def take(self) -> None:
        """Save the state before another worker runs; raises `UnsupportedError` within an import."""
        self._refuse_import()
        self._directory, self._stderr = os.getcwd(), sys.stderr

    def put(self) -> None:
        """Restore the state before this worker goes on."""
        values = (str(self.rank), str(self.size), "0", "1")
        if self.says_rank:
            os.environ.update(zip(COORDINATES, values, strict=True))
        sys.stderr = self._stderr
        if os.getcwd() != self._directory:
            os.chdir(self._directory)

    def _refuse_import(self) -> None:
        """The lock of a module that is being imported would block the next worker that imports it."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == IMPORTING and frame.f_code.co_name == "_find_and_load":
                raise UnsupportedError(
                    f"virtual worker {self.rank} reaches an exchange while the module {frame.f_locals.get('name')} is "
                    "being imported, and other workers would wait for that import for ever; move the training into a "
                    "function of that module, and call it from the script"
                )
            frame = frame.f_back


@contextlib.contextmanager
def shared_process() -> Iterator[Start]:
    """Within it, each virtual worker has its own process state, or a change of it is refused.

    Yields the initial state of every worker. Other threads are not affected. Environment and working directory are
    restored at the end.
    """
    directory, stderr = os.getcwd(), sys.stderr
    coordinates = {name: os.environ.get(name) for name in COORDINATES}
    substitutes: list[tuple[Any, str, Callable[..., Any]]] = [
        (atexit, "register", _register),
        (signal, "signal", _Handlers().signal),
        (torch, "set_num_interop_threads", _interop_threads),
    ]
    if hasattr(torch.distributed, "init_process_group"):
        substitutes.append((torch.distributed, "init_process_group", _process_group))
    originals = [(place, name, getattr(place, name)) for place, name, _ in substitutes]
    for place, name, substitute in substitutes:
        setattr(place, name, _for_workers(getattr(place, name), substitute))
    try:
        yield directory, stderr
    finally:
        for place, name, original in originals:
            setattr(place, name, original)
        for name, value in coordinates.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        sys.stderr = stderr
        os.chdir(directory)


_exits: dict[int, contextlib.ExitStack] = {}  # rank -> its atexit functions


@contextlib.contextmanager
def isolated_script(transport: virtual.VirtualTransport, start: Start) -> Iterator[None]:
    """The context of one virtual worker's script, with its own process state."""
    rank = transport.world.rank
    transport.cluster.keep(rank, IsolatedProcess(rank, transport.world.size, start))
    with contextlib.ExitStack() as _exits[rank]:
        yield


def _for_workers(real: Callable[..., Any], substitute: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `real`, or in the thread of a virtual worker `substitute(rank, real, ...)`."""

    def chosen(*arguments: Any, **named: Any) -> Any:
        transport = virtual.current()
        if transport is None:
            return real(*arguments, **named)
        return substitute(transport.world.rank, real, *arguments, **named)

    return chosen


def _register(rank: int, real: Callable[..., Any], function: Any, *arguments: Any, **named: Any) -> Any:
    """Functions of the script run at the worker's end, functions of libraries at the end of the process."""
    if sys._getframe(2).f_globals.get("__name__") != "__main__":
        return real(function, *arguments, **named)
    _exits[rank].callback(function, *arguments, **named)
    return function


def _interop_threads(rank: int, real: Callable[..., Any], number: int) -> None:
    """torch allows one call in a process."""
    if torch.get_num_interop_threads() != number:
        real(number)


def _process_group(rank: int, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    raise UnsupportedError(
        f"virtual worker {rank} calls torch.distributed.init_process_group, but virtual workers live in one process; "
        "remove the call under a simulation (paceline.attach finds the workers by itself)"
    )


class _Handlers:
    """The signal handlers of each worker, which are not called."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Any] = {}

    def signal(self, rank: int, real: Callable[..., Any], number: int, handler: Any) -> Any:
        """Keep a handler; returns its predecessor."""
        if number not in STOPS:
            raise UnsupportedError(
                f"virtual worker {rank} sets a handler for {signal.Signals(number).name}, which would reach all "
                "workers of the simulation; remove it, or use `paceline run`"
            )
        before = self._kept.get((rank, number), signal.getsignal(number))
        if rank == 0 and (rank, number) not in self._kept:
            print(
                f"note: the handler for {signal.Signals(number).name} is not called in a simulation, which ends as a "
                "whole",
                file=sys.stderr,
            )
        self._kept[rank, number] = handler
        return before
