# SPDX-License-Identifier: Apache-2.0
"""Waits until no other program uses the processors, so that a measurement has them for itself."""

from __future__ import annotations

import time

from _emulate import idle_share, processor_ticks

WINDOW_S = 0.1
SHARE = 0.9
"""Of the processors' time in a window that has to be idle."""


def wait_until_idle(most_s: float) -> bool:
    """Wait, at most so long; whether the processors were idle at the end. Without a wait where `most_s` is 0."""
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        before = processor_ticks()
        time.sleep(WINDOW_S)
        if idle_share(before, processor_ticks()) >= SHARE:
            return True
    return False
