# SPDX-License-Identifier: Apache-2.0
"""What a script takes for its own process's, where N virtual workers share one.

=============================================  ========================================================================
random generators, `sys.argv`, `sys.stdout`,   move with the baton (:mod:`paceline.communication.virtual.scheduler`)
the module `__main__`
working directory, `sys.stderr`                move with the baton (:class:`IsolatedProcess`)
`RANK`, `WORLD_SIZE`                           each worker's own; `LOCAL_RANK` is 0 for all, since there is one device
`atexit.register` in the script                called when the worker's script has ended, last come first
handlers of signals that ask a process to stop  kept, never called: a signal ends the simulation as a whole
handlers of other signals                      refused
`torch.distributed.init_process_group`         refused: paceline finds the virtual cluster by itself
`torch.set_num_interop_threads`                the first worker's holds, and the same number is no error in the others
an exchange inside an `import`                 refused: the others would wait for the import for ever
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
STOPS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGPIPE")
    if hasattr(signal, name)
)
"""Signals by which a process is asked to stop, or to save; a simulation leaves a handler of them uncalled."""
Start = tuple[str, TextIO]
IMPORTING = "<frozen importlib._bootstrap>"


class IsolatedProcess:
    """The working directory, the standard error and the coordinates of one virtual worker.

    Args:
        rank: the worker.
        size: number of workers.
        start: directory and standard error with which every worker begins.

    Attributes:
        says_rank: whether the environment names the worker; not to a program that sees one device only.
    """

    says_rank = True

    def __init__(self, rank: int, size: int, start: Start) -> None:
        self.rank, self.size = rank, size
        self._directory, self._stderr = start
        self.put()

    def take(self) -> None:
        """Before others work; raises `UnsupportedError` within an import."""
        self._refuse_import()
        self._directory, self._stderr = os.getcwd(), sys.stderr

    def put(self) -> None:
        """Before this worker goes on."""
        values = (str(self.rank), str(self.size), "0", "1")
        if self.says_rank:
            os.environ.update(zip(COORDINATES, values, strict=True))
        sys.stderr = self._stderr
        if os.getcwd() != self._directory:
            os.chdir(self._directory)

    def _refuse_import(self) -> None:
        """A module that is being imported is locked until it is; the next worker that imports it would hang."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == IMPORTING and frame.f_code.co_name == "_find_and_load":
                raise UnsupportedError(
                    f"virtual worker {self.rank} comes to an exchange while the module {frame.f_locals.get('name')} is "
                    "being imported, and the others would wait for that import for ever; put what trains into a "
                    "function of that module, and call it from the script"
                )
            frame = frame.f_back


@contextlib.contextmanager
def shared_process() -> Iterator[Start]:
    """While it lasts, what a script does to its process is each virtual worker's own, or refused by name.

    Gives what every worker begins with. Only threads of virtual workers notice. Environment and working directory are
    afterwards what they were before.
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


_exits: dict[int, contextlib.ExitStack] = {}  # rank -> what its script has registered for its end


@contextlib.contextmanager
def isolated_script(transport: virtual.VirtualTransport, start: Start) -> Iterator[None]:
    """Around the script of one virtual worker: gives it a process of its own."""
    rank = transport.world.rank
    transport.cluster.keep(rank, IsolatedProcess(rank, transport.world.size, start))
    with contextlib.ExitStack() as _exits[rank]:
        yield


def _for_workers(real: Callable[..., Any], substitute: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, but in the thread of a virtual worker `substitute(rank, real, ...)`."""

    def chosen(*arguments: Any, **named: Any) -> Any:
        transport = virtual.current()
        if transport is None:
            return real(*arguments, **named)
        return substitute(transport.world.rank, real, *arguments, **named)

    return chosen


def _register(rank: int, real: Callable[..., Any], function: Any, *arguments: Any, **named: Any) -> Any:
    """What the script registers is its worker's; what a library does when it is loaded is the process's."""
    if sys._getframe(2).f_globals.get("__name__") != "__main__":
        return real(function, *arguments, **named)
    _exits[rank].callback(function, *arguments, **named)
    return function


def _interop_threads(rank: int, real: Callable[..., Any], number: int) -> None:
    """torch takes this number once in a process."""
    if torch.get_num_interop_threads() != number:
        real(number)


def _process_group(rank: int, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    raise UnsupportedError(
        f"virtual worker {rank} calls torch.distributed.init_process_group, but virtual workers live in one process; "
        "leave the call away under a simulation (paceline.attach finds the workers by itself)"
    )


class _Handlers:
    """Handlers of signals, each worker's own."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Any] = {}

    def signal(self, rank: int, real: Callable[..., Any], number: int, handler: Any) -> Any:
        """Keep a handler; its predecessor."""
        if number not in STOPS:
            raise UnsupportedError(
                f"virtual worker {rank} sets a handler for {signal.Signals(number).name}, which would reach all "
                "workers of the simulation alike; leave it away, or use `paceline run`"
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
