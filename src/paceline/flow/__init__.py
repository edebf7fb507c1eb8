# SPDX-License-Identifier: Apache-2.0
"""Elastic runs: workers under a block rule may join and leave while the run continues.

The control plane (:mod:`paceline.flow.control`) decides membership and commits exchanges; the workers' own connections
carry the tensors (:mod:`paceline.communication.ring`). An exchange is repeated until all live members have the complete
result, and only then applied. If a worker dies in the middle of one, the survivors repeat it from the contributions
that they hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.flow.engine import ElasticEngine
    from paceline.flow.joining import GivenState
    from paceline.flow.leaving import save_while_paused
    from paceline.flow.membership import ElasticMembership, check_rule, fingerprint, join
    from paceline.flow.wanted import refuse_waiting
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ElasticEngine": "engine",
            "GivenState": "joining",
            "ElasticMembership": "membership",
            "check_rule": "membership",
            "fingerprint": "membership",
            "join": "membership",
            "refuse_waiting": "wanted",
            "save_while_paused": "leaving",
        },
    )

__all__ = [
    "ElasticEngine",
    "ElasticMembership",
    "GivenState",
    "check_rule",
    "fingerprint",
    "join",
    "refuse_waiting",
    "save_while_paused",
]
