# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run go besides its event log: trackers, which are recognised by their methods, and HTTP."""

from __future__ import annotations

from paceline.observe.sinks.base import Sink

__all__ = ["Sink"]
