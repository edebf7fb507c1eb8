# SPDX-License-Identifier: Apache-2.0
"""Floor 2, the fourth choice of a rule: over which route?"""

from __future__ import annotations

from paceline.topology.base import Route, Topology
from paceline.topology.flat import Flat
from paceline.topology.hierarchical import Hierarchical
from paceline.topology.ordered import Ordered
from paceline.topology.sharded import Cut, Sharded

__all__ = ["Cut", "Flat", "Hierarchical", "Ordered", "Route", "Sharded", "Topology"]
