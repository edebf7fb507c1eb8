# SPDX-License-Identifier: Apache-2.0
"""The fourth choice of a rule: over which route?"""

from __future__ import annotations

from paceline.rules.topology.base import Route, Topology
from paceline.rules.topology.flat import Flat
from paceline.rules.topology.hierarchical import Hierarchical
from paceline.rules.topology.ordered import Ordered
from paceline.rules.topology.sharded import Cut, Sharded

__all__ = ["Cut", "Flat", "Hierarchical", "Ordered", "Route", "Sharded", "Topology"]
