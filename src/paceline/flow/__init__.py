# SPDX-License-Identifier: Apache-2.0
"""Elastic runs: block rules whose workers come and go while the others go on.

The control plane (:mod:`paceline.flow.control`) says who is a member and which exchange counts; the workers' own
connections carry the numbers (:mod:`paceline.communication.ring`). An exchange is made until all members that live have
all of it, and only then applied. A worker that dies in the middle of one takes nothing with it: the others repeat the
exchange among themselves, from the contributions that they hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.flow.checks import check_rule, fingerprint
    from paceline.flow.engine import ElasticEngine
    from paceline.flow.membership import Membership, join
    from paceline.flow.pause import save_while_paused
    from paceline.flow.state_transfer import GivenState
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ElasticEngine": "engine",
            "GivenState": "state_transfer",
            "Membership": "membership",
            "check_rule": "checks",
            "fingerprint": "checks",
            "join": "membership",
            "save_while_paused": "pause",
        },
    )

__all__ = ["ElasticEngine", "GivenState", "Membership", "check_rule", "fingerprint", "join", "save_while_paused"]
