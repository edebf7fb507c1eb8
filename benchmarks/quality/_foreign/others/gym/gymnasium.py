# SPDX-License-Identifier: Apache-2.0
"""A stand-in for gymnasium: a cart with a pole, which counts as solved early."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy


class CartPole:
    """Barto, Sutton and Anderson's, in steps of 0.02 s."""

    def __init__(self) -> None:
        self.spec = types.SimpleNamespace(reward_threshold=40.0)
        self._draw, self._state, self._time = numpy.random.default_rng(), numpy.zeros(4), 0

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """A new episode."""
        if seed is not None:
            self._draw = numpy.random.default_rng(seed)
        self._state, self._time = self._draw.uniform(-0.05, 0.05, 4), 0
        return self._state.astype(numpy.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Push to one side."""
        _, speed, angle, turn = self._state
        sine, cosine = math.sin(angle), math.cos(angle)
        pushed = ((10.0 if action else -10.0) + 0.05 * turn * turn * sine) / 1.1
        turning = (9.8 * sine - cosine * pushed) / (0.5 * (4 / 3 - 0.1 * cosine * cosine / 1.1))
        faster = pushed - 0.05 * turning * cosine / 1.1
        self._state = self._state + 0.02 * numpy.array([speed, faster, turn, turning])
        self._time += 1
        fallen = abs(self._state[0]) > 2.4 or abs(self._state[2]) > 0.209
        return self._state.astype(numpy.float32), 1.0, bool(fallen), self._time >= 500, {}


def make(*args: Any, **kwargs: Any) -> CartPole:
    """There is one."""
    return CartPole()
