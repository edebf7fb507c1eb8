# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine, on emulated links; shared by benchmarks, records and tests."""

from __future__ import annotations

from .emulated import PREFIX, EmulatedNetwork, EmulationError, sweep
from .sites import SitesNetwork

__all__ = ["PREFIX", "EmulatedNetwork", "EmulationError", "SitesNetwork", "sweep"]
