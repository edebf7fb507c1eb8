# SPDX-License-Identifier: Apache-2.0
"""Drives exchanges (generators that yield the operations that they start), in background threads where that pays.

An exchange of several operations is a pipeline: while the second operation of one chunk is on the wire, the first
of the next can be, and a third is being packed. Each stage is a thread that takes chunks in the order in which they
came: stage 0 packs and starts the first operation, stage k waits for operation k - 1, computes, and starts
operation k. Every operation has a channel of its own (:meth:`paceline.communication.base.Transport.channel`), so what
is started on a channel is started by one thread in one order, the same on every worker, whatever the threads' timing.

Where exchanges have one operation, or the transport works elsewhere (virtual workers, a GPU's own streams), there is no
thread: the first operation starts at once, and `finish` does the rest. With overlap, workers finish an exchange at
different times (a worker that ends, restarts a block or exports the model is early), so that later operations would
start in different orders. Then all operations start with the exchange (`eager`), each as soon as the one before is
over, so that the order of operations is that of the exchanges, the same on every worker.

On a GPU that is done on a side stream, for all exchanges: the stream, and not the host, waits from one operation to the
next. What follows the last operation needs all workers' headers, which come to the host. `progress`, which is called at
every step, goes on with it as soon as they are there, and never waits: an exchange starts no operation then, so its
moment may differ from worker to worker.

Training has queued what an exchange reads when the exchange starts, so the side stream waits for that (`fork`); from
then on both go on at once, and training waits for the side stream when it uses the result (`join`). Both waits are the
device's: the host goes on. NCCL's operations are waited for by the stream that asks, so on a side stream an exchange of
several operations can be queued whole. Exchanges take turns on a few streams: the result of one does not wait for those
that started after it. Where a back end takes host memory, only a thread of the pipeline waits for the copies.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.communication.base import Pending
from paceline.core import runtime
from paceline.rules.codec.base import Steps

STREAMS = 3
"""As many as chunks on the wire at a time."""


class SideStream:
    """A stream of a CUDA device beside training."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @classmethod
    def beside(cls, devices: Iterable[torch.device]) -> list[SideStream]:
        """For a model on these devices: streams of its CUDA device, if it has one and no other."""
        all_of_them = set(devices)
        if len(all_of_them) != 1 or next(iter(all_of_them)).type != "cuda":
            return []
        return [cls(device) for device in all_of_them for _ in range(STREAMS)]

    def entered(self) -> AbstractContextManager[Any]:
        """Context in which this thread queues its work on it."""
        return torch.cuda.stream(self._stream)

    def fork(self) -> None:
        """What is queued on it from now on comes after what this thread has queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def join(self) -> None:
        """What this thread queues from now on comes after all that is queued on it."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A copy of `x` on another device: complete, if that is the host's, else for this thread's stream.

    Between host and CUDA it goes through pinned memory, which torch keeps for the next ones; a copy to CUDA from other
    memory would let the host wait for all that is queued.
    """
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    if x.device.type != "cuda" or device.type != "cpu":
        return x.to(device)
    copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copy.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return copy


@runtime_checkable
class Pollable(Protocol):
    """A `Pending` that tells whether `wait` would return, or raise, at once."""

    def wait(self) -> None: ...

    def completed(self) -> bool: ...


@dataclass(frozen=True)
class LastWait:
    """A `Pending` after which an exchange starts no other operation."""

    wait: Callable[[], Any]
    completed: Callable[[], bool]


class Running:
    """An exchange under way: stages drive it, or its own worker, until it is `over`."""

    def __init__(self, steps: Steps[Any], side: SideStream | None, staged: bool = False) -> None:
        self._steps, self._side = steps, side
        self._pending: Pending | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = runtime.Event() if staged else None
        self.over = False

    @classmethod
    def finished(cls, result: Any) -> Running:
        one = cls(iter(()), None)  # type: ignore[arg-type]
        one._result, one.over = result, True
        return one

    def advance(self) -> bool:
        """Wait for the operation under way, compute, and start the next one; whether there is one."""
        if self.over:
            return False
        try:
            with self._side.entered() if self._side is not None else contextlib.nullcontext(), torch.no_grad():
                if self._pending is not None:
                    self._pending.wait()
                self._pending = next(self._steps)
            return True
        except StopIteration as stop:
            self._result = stop.value
        except BaseException as error:
            self._error = error
        del self._steps, self._pending  # and with them the memory that they hold
        self.over = True
        if self._done is not None:
            self._done.set()
        return False

    def start(self, operations: int) -> None:
        """Start so many operations, or as many as it has."""
        for _ in range(operations):
            if not self.advance() or isinstance(self._pending, LastWait):
                break

    def progress(self) -> None:
        """Go on, as far as nothing is to be waited for."""
        while not self.over and isinstance(self._pending, Pollable) and self._pending.completed():
            if self._side is not None:
                self._side.fork()
            self.advance()

    def finish(self) -> Any:
        """The exchange's result, for this thread's stream; raises what it raised."""
        if self._done is not None:
            self._done.wait()  # every operation in it has a deadline
        while self.advance():
            pass
        if self._side is not None:
            self._side.join()
        if self._error is not None:
            raise self._error
        return self._result


Stage = queue.SimpleQueue["Running | None"]
"""The exchanges that a thread takes one after another; None ends it."""


class Pipeline:
    """The stages for exchanges of so many operations at most, with `threads` in the background; exchanges take turns on
    the streams `sides`."""

    def __init__(self, threads: bool, operations: int, sides: Sequence[SideStream] = ()) -> None:
        self._threads, self._operations = threads, operations
        self._sides = itertools.cycle(sides or [None])
        self._stages: list[Stage] = []
        self._started: list[Running] = []  # without threads: those all of whose operations have started

    def start(self, steps: Steps[Any], eager: bool = False) -> Running:
        """Start an exchange, without threads all of its operations if `eager`; exchanges go through every stage in the
        order in which they were started."""
        side = next(self._sides)
        if side is not None:
            side.fork()
        running = Running(steps, side, self._threads)
        if self._threads:
            _stage(self._stages, 0).put(running)
        elif eager or side is not None:
            running.start(self._operations)
            self._started = [*(one for one in self._started if not one.over), running]
        else:
            running.advance()
        return running

    def progress(self) -> None:
        """Without threads: go on with exchanges all of whose operations have started, without waiting."""
        for running in self._started:
            running.progress()
        self._started = [running for running in self._started if not running.over]

    def close(self) -> None:
        """End the threads after the exchanges that they have."""
        stages, self._stages = self._stages, []
        if stages:
            stages[0].put(None)


def _stage(stages: list[Stage], number: int) -> Stage:
    """A stage; its thread starts with its first exchange."""
    if number == len(stages):
        stages.append(runtime.SimpleQueue())
        runtime.thread(_work, f"paceline-stage-{number}", (stages, number)).start()
    return stages[number]


def _work(stages: list[Stage], number: int) -> None:
    while (running := stages[number].get()) is not None:
        if running.advance():
            _stage(stages, number + 1).put(running)
    if number + 1 < len(stages):  # only now: it may still have got an exchange from this one
        stages[number + 1].put(None)
