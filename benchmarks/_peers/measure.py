# SPDX-License-Identifier: Apache-2.0
"""One row on one worker: warm up, start together, measure whole blocks, say what the kernel counted."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from _emulate import idle_share, processor_ticks

from .counters import processor_s, sent_bytes
from .fleet import Place
from .rows import ROWS, build
from .setting import Setting, Trainer

WARM_STEPS = 3  # DDP makes its buckets anew after a step
INTERFACE = "eth0"
QUIET_S, QUIET_BYTES, QUIET_AT_LAST_S = 0.25, 20_000, 5.0  # heartbeats go on


def measure(name: str, setting: Setting, place: Place) -> dict[str, Any]:
    """Train a row's model.

    Returns:
        seconds of this worker's timed steps; processor seconds, sent bytes and exchanges of its counted steps, which
        are one step or block more; and the share of the machine's processors that was idle.
    """
    torch.set_num_threads(1)
    each = setting.period if ROWS[name].blocks else 1
    timed = each * (setting.blocks if ROWS[name].blocks else setting.steps)
    trainer = build(name, setting, place)
    _train(trainer, each if ROWS[name].blocks else WARM_STEPS)
    gc.collect()
    place.meet()
    _wait_until_quiet()
    made = trainer.exchanges() if trainer.exchanges else 0.0
    busy, sent, ticks = processor_s(), sent_bytes(INTERFACE), processor_ticks()
    place.meet()
    _train(trainer, each)  # a block that is not timed: the next one waits for its exchange, where they overlap
    place.meet()
    seconds = _train(trainer, timed)
    place.meet()
    idle = idle_share(ticks, processor_ticks())
    _wait_until_quiet()  # the last exchange, where it overlaps, is counted, and that before the first was not
    counted = each + timed
    found = {
        "seconds": seconds,
        "processor_s": processor_s() - busy,
        "sent_bytes": sent_bytes(INTERFACE) - sent,
        "idle": idle,
        "timed_steps": timed,
        "counted_steps": counted,
        "exchanges": trainer.exchanges() - made if trainer.exchanges else counted / each,
    }
    place.meet()  # no worker leaves while another one counts
    return found


def _train(trainer: Trainer, steps: int) -> float:
    """Seconds that so many steps take."""
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    return time.perf_counter() - began


def _wait_until_quiet() -> None:
    """Until an exchange in the background is over."""
    deadline = time.perf_counter() + QUIET_AT_LAST_S
    before = -QUIET_BYTES
    while time.perf_counter() < deadline and sent_bytes(INTERFACE) - before >= QUIET_BYTES:
        before = sent_bytes(INTERFACE)
        time.sleep(QUIET_S)
