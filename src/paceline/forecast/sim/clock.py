# SPDX-License-Identifier: Apache-2.0
"""The simulated clock for users: `simulate(train, workers=8, clock=Clock(compute=exponential()))`."""

from __future__ import annotations

from paceline.communication.virtual.clock import Clock, Compute, Network, exponential, link, uniform

__all__ = ["Clock", "Compute", "Network", "exponential", "link", "uniform"]
