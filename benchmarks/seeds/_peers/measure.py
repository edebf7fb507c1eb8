# SPDX-License-Identifier: Apache-2.0
"""One row on one worker: warm up, start together, measure whole blocks, say what the kernel counted."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import torch
from _emulate import idle_share, processor_ticks

from .counters import processor_s, sent_bytes
from .fleet import Place
from .rows import ALL, build
from .setting import Setting, Trainer

WARM_STEPS = 3  # DDP makes its buckets anew after a step
INTERFACE = "eth0"
QUIET_S, QUIET_BYTES, QUIET_AT_LAST_S = 0.25, 20_000, 5.0  # heartbeats go on


def measure(name: str, setting: Setting, place: Place) -> dict[str, Any]:
    """Train a row's model.

    Returns:
        seconds of this worker's timed steps; processor seconds, sent bytes and exchanges of its counted steps, which
        are one step or block more, or more still; and the share of the machine's processors that was idle.
    """
    torch.set_num_threads(1)
    row, trainer = ALL[name], build(name, setting, place)
    each = setting.period if row.blocks else 1
    timed = each * (setting.blocks if row.blocks else setting.steps)
    train = partial(_train_for, trainer, setting.compute_ms * 2e-3) if row.free else partial(_train, trainer)
    train(each if row.blocks else WARM_STEPS)
    gc.collect()
    _meet(place, trainer, row.free)
    if not row.free:
        _wait_until_quiet()
    made = trainer.exchanges() if trainer.exchanges else 0.0
    busy, sent, ticks = processor_s(), sent_bytes(INTERFACE), processor_ticks()
    counted = _meet(place, trainer, row.free)
    counted += train(each)[0]  # a block that is not timed: the next one waits for its exchange, where they overlap
    counted += _meet(place, trainer, row.free)
    steps, seconds = train(timed)
    counted += steps + _meet(place, trainer, row.free)
    idle = idle_share(ticks, processor_ticks())
    if not row.free:
        _wait_until_quiet()  # the last exchange, where it overlaps, is counted, and that before the first was not
    found = {
        "seconds": seconds,
        "processor_s": processor_s() - busy,
        "sent_bytes": sent_bytes(INTERFACE) - sent,
        "idle": idle,
        "timed_steps": steps,
        "counted_steps": counted,
        "exchanges": trainer.exchanges() - made if trainer.exchanges else counted / each,
    }
    if row.free:
        place.pipe.send(("done", found))
        while True:  # until all are done and killed: another worker may wait for this one in an exchange
            trainer.step()
    place.meet()  # no worker leaves while another one counts
    return found


def _meet(place: Place, trainer: Trainer, free: bool) -> int:
    """Wait for all workers; the steps made meanwhile, by a worker that is not held up."""
    if not free:
        place.meet()
        return 0
    place.pipe.send(("met", None))
    made = 0
    while not place.pipe.poll():
        trainer.step()
        made += 1
    place.pipe.recv()
    return made


def _train(trainer: Trainer, steps: int) -> tuple[int, float]:
    """Train; the steps made, and their seconds."""
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    return steps, time.perf_counter() - began


def _train_for(trainer: Trainer, step_s: float, steps: int) -> tuple[int, float]:
    """Train for as long as so many steps of `step_s` seconds would take: no worker keeps another."""
    began, made = time.perf_counter(), 0
    while time.perf_counter() < began + steps * step_s or not made:
        trainer.step()
        made += 1
    return made, time.perf_counter() - began


def _wait_until_quiet() -> None:
    """Until an exchange in the background is over."""
    deadline = time.perf_counter() + QUIET_AT_LAST_S
    before = -QUIET_BYTES
    while time.perf_counter() < deadline and sent_bytes(INTERFACE) - before >= QUIET_BYTES:
        before = sent_bytes(INTERFACE)
        time.sleep(QUIET_S)
