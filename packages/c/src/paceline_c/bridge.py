# SPDX-License-Identifier: Apache-2.0
"""The Python half of libpaceline: a function for each of `paceline.h`, called by `paceline.c`.

Arrays come as addresses, text as bytes or None. Each function returns an `Answer`, never raises, and runs alone: a run
serves one call at a time, and a tool may have many threads. The C half holds Python's lock only inside of a call, and a
call that waits for other workers releases it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import paceline
from paceline_c import mapped, reading
from paceline_c.memory import CUDA, device_of
from paceline_c.ranges import Range, Ranges
from paceline_c.status import MORE, OK, Answer, StateError, answer_of

FIRST_STEPS = 16
"""In so many steps the run looks at the arrays even where nothing is exchanged: do they change at all?"""
KEPT_GRADIENTS = 8
"""Sets of addresses of gradients whose views are kept."""
LOCK = threading.RLock()


class Tool:
    """What the tool has named, and its run.

    Attributes:
        settings: of `attach_arrays`, by `pl_set`.
        extra: addresses of buffers and of the momentum, read at attach.
        run: the present one.
        last: the one before, if any; closed.
    """

    def __init__(self, last: Any = None) -> None:
        self.settings: dict[str, Any] = {}
        self.extra: dict[str, Any] = {}
        self.run: Any = None
        self.last = last
        self.device = (1, 0)
        self.shapes: list[tuple[int, int]] = []  # (size, dtype) of each array
        self.gradients: dict[tuple[int, ...], list[Any]] = {}
        self.ranges: Ranges | None = None
        self.passing: Iterator[Range] | None = None
        self.inside = ExitStack()  # `global_model` of the run
        self.evaluates = False

    def open(self) -> Any:
        """The run, or `StateError`."""
        if self.run is None:
            raise StateError(
                "the run is closed; pl_attach begins another"
                if self.last is not None
                else "there is no run; call pl_attach first"
            )
        return self.run

    def training(self) -> Any:
        """The run, whose arrays hold this worker's numbers; or `StateError`."""
        if self.evaluates:
            raise StateError("the arrays hold the global model; call pl_global_model(0) before training goes on")
        return self.open()

    def wait_for_device(self) -> None:
        """The tool computes on streams of its own, and torch on another."""
        if self.device[0] == CUDA:
            import torch

            torch.cuda.synchronize(self.device[1])


tool = Tool()
Function = Callable[..., Answer | None]


def answering(function: Function) -> Callable[..., Answer]:
    """Run it alone, and turn what it raises into a status and a sentence."""

    @functools.wraps(function)
    def answer(*given: Any) -> Answer:
        with LOCK:
            try:
                return function(*given) or Answer()
            except BaseException as error:  # a SystemExit or a Ctrl-C must not pass through C, either
                return answer_of(error)

    return answer


# -- before the run ---------------------------------------------------------------------------------------------------


def _before(function: str) -> None:
    if tool.run is not None:
        raise StateError(f"{function} comes before pl_attach, and a run is attached already")


@answering
def set_(name: bytes | None, value: bytes | None) -> None:
    """A setting of `attach_arrays`: a number, true, false or text."""
    _before("pl_set")
    tool.settings[reading.text("name", name)] = reading.value(reading.text("value", value))


@answering
def buffers(count: int, arrays: int, sizes: int, kinds: int) -> None:
    """Arrays that are averaged and not trained."""
    _before("pl_buffers")
    shapes = reading.shapes(reading.count(count), sizes, kinds)
    tool.extra["buffers"] = (reading.addresses("arrays", count, arrays), shapes)


@answering
def momentum(count: int, arrays: int, decay: float) -> None:
    """The tool's momentum, and the factor by which it decays."""
    _before("pl_momentum")
    tool.extra["momentum"] = (reading.addresses("arrays", reading.count(count), arrays), decay)


@answering
def attach(count: int, arrays: int, sizes: int, kinds: int, device: bytes | None, rule: bytes | None) -> None:
    """`paceline.attach_arrays` of the arrays at these addresses."""
    if tool.run is not None:
        raise StateError("a run is attached already, and a process has one at a time; call pl_close before pl_attach")
    tool.device = device_of("cpu" if device is None else reading.text("device", device))
    tool.shapes = reading.shapes(reading.count(count), sizes, kinds)
    held = reading.memory("array", reading.addresses("arrays", count, arrays), tool.shapes, tool.device)
    extra = _extra(count)
    if tool.device[0] != CUDA:
        mapped.check([one.place for one in [*held, *extra.get("buffers", ()), *extra.get("momentum", ())]])
    tool.wait_for_device()
    tool.run = paceline.attach_arrays(
        held, None if rule is None else reading.text("rule", rule), **extra, **tool.settings
    )
    tool.wait_for_device()
    tool.settings, tool.extra = {}, {}


def _extra(count: int) -> dict[str, Any]:
    """Buffers and momentum, as `attach_arrays` takes them."""
    found: dict[str, Any] = {}
    if "buffers" in tool.extra:
        addresses, shapes = tool.extra["buffers"]
        found["buffers"] = reading.memory("buffer", addresses, shapes, tool.device)
    if "momentum" in tool.extra:
        speed, found["decay"] = tool.extra["momentum"]
        if len(speed) != count:
            raise ValueError(f"pl_momentum named {len(speed)} arrays, and pl_attach {count}; each array needs its own")
        found["momentum"] = reading.memory("momentum", speed, tool.shapes, tool.device)
    return found


# -- the loop ---------------------------------------------------------------------------------------------------------


@answering
def mean(gradients: int) -> None:
    """Replace the gradients at these addresses by their mean."""
    run = tool.training()
    found = tuple(one or 0 for one in reading.addresses("gradients", len(tool.shapes), gradients))
    views = tool.gradients.get(found)
    if views is None:
        from torch.utils.dlpack import from_dlpack

        views = [from_dlpack(one) for one in reading.memory("gradient", list(found), tool.shapes, tool.device)]
        if len(tool.gradients) >= KEPT_GRADIENTS:
            tool.gradients.clear()
        tool.gradients[found] = views
    tool.wait_for_device()
    run.mean(views)
    tool.wait_for_device()


@answering
def step() -> Answer:
    """After a step of the tool; how many of the next ones the C half may count by itself."""
    run = tool.training()
    on_device = tool.device[0] == CUDA
    quiet = on_device and run.quiet
    if on_device and (not quiet or run.minibatches < FIRST_STEPS):
        tool.wait_for_device()
    run.step()
    if on_device and not quiet:
        tool.wait_for_device()
    return Answer(first=run.idle_steps)


@answering
def make_up(steps: int) -> None:
    """So many steps have been made since the last call, and the C half has counted them."""
    run = tool.open()
    for _ in range(steps):
        run.step()


@answering
def next_range(total: int, batch: int) -> Answer:
    """The next samples of this worker."""
    run = tool.open()
    known = tool.ranges
    if tool.passing is None:
        if known is None or (known.total, known.batch) != (total, batch):
            known = tool.ranges = Ranges(total, batch)
        tool.passing = iter(run.share(known))
    elif known is not None and (known.total, known.batch) != (total, batch):
        raise ValueError(
            f"this epoch has {known.total} samples in batches of {known.batch}, got total {total} and batch {batch}; "
            "keep both until pl_next_range returns 0, or call pl_done before"
        )
    found = next(tool.passing, None)
    if found is None:
        tool.passing = None
        return Answer(OK)
    return Answer(MORE, first=found.begin, second=found.end)


@answering
def done() -> None:
    """Leave the epoch early."""
    tool.open()
    passing: Any = tool.passing
    tool.passing = None
    if passing is not None:
        passing.close()


@answering
def merge() -> None:
    """Merge the work of all workers now."""
    run = tool.training()
    tool.wait_for_device()
    run.merge()
    tool.wait_for_device()


@answering
def global_model(inside: int) -> None:
    """Put the global model into the arrays, or this worker's numbers back."""
    run = tool.open()
    tool.wait_for_device()
    if inside and not tool.evaluates:
        tool.inside.enter_context(run.global_model())
    elif not inside:
        tool.inside.close()
    tool.evaluates = bool(inside)
    tool.wait_for_device()


# -- settings, the log, checkpoints -----------------------------------------------------------------------------------


@answering
def tuned(name: bytes | None, preset: float) -> Answer:
    """The present value of a setting."""
    return Answer(value=tool.open().tuned(reading.text("name", name), preset))


@answering
def tune(name: bytes | None, value: float) -> None:
    """Change a setting on all workers."""
    called = reading.text("name", name)
    tool.open().tune(**{called: int(value) if called == "period" and value.is_integer() else value})


@answering
def log(name: bytes | None, value: float) -> None:
    """Write a value to the event log."""
    tool.open().log(**{reading.text("name", name): value})


@answering
def save(path: bytes | None) -> None:
    """Write a checkpoint."""
    run = tool.training()
    tool.wait_for_device()
    run.save(reading.path(path))


@answering
def resume(path: bytes | None) -> Answer:
    """Restore a checkpoint, if there is one."""
    run = tool.training()
    found = run.resume(None if path is None else reading.path(path))
    tool.wait_for_device()
    return Answer(MORE if found else OK)


# -- where this worker is ---------------------------------------------------------------------------------------------


@answering
def rank() -> Answer:
    """Of this worker; also after the end."""
    return Answer(first=(tool.run or tool.last or tool.open()).world.rank)


@answering
def size() -> Answer:
    """Workers; also after the end."""
    return Answer(first=(tool.run or tool.last or tool.open()).world.size)


@answering
def epoch() -> Answer:
    """Of the shared samples."""
    return Answer(first=tool.open().epoch)


@answering
def minibatches() -> Answer:
    """Steps of this worker."""
    return Answer(first=tool.open().minibatches)


# -- the end ----------------------------------------------------------------------------------------------------------


def _end(leave: str) -> None:
    """`close` or `abandon` the run; whatever happens, it is over."""
    global tool
    ended, tool = tool, Tool(last=tool.run)
    passing: Any = ended.passing
    ended.wait_for_device()
    ended.inside.close()
    if passing is not None:
        passing.close()
    getattr(ended.run, leave)()
    ended.wait_for_device()


@answering
def close() -> None:
    """End the run together with all workers."""
    if tool.run is not None or tool.last is None:
        tool.open()
        _end("close")


@answering
def abandon() -> None:
    """Leave at once."""
    if tool.run is not None:
        _end("abandon")


def leave(code: int) -> Answer:
    """The tool exits with `code`: close its run if that is 0, else leave at once, even within another thread's call."""
    if not LOCK.acquire(timeout=-1 if code == 0 else 1.0):
        return Answer()
    try:
        found = close() if code == 0 and tool.run is not None else abandon()
        sys.stdout.flush()
        sys.stderr.flush()
        return found
    finally:
        LOCK.release()
