# SPDX-License-Identifier: Apache-2.0
"""Block rules whose workers come and go while the others go on.

The control plane (:mod:`paceline.control`) says who is a member and which exchange counts; the workers' own
connections carry the numbers (:mod:`paceline.communication.ring`). An exchange is made until all members that live have
all of it, and only then applied, so that whoever dies in the middle of one takes nothing with it: the others make it
once more among themselves, from what they hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.elastic.driver import Elastic, check_rule, fingerprint
    from paceline.elastic.handover import Given
    from paceline.elastic.live import Live, join
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "Elastic": "driver",
            "Given": "handover",
            "Live": "live",
            "check_rule": "driver",
            "fingerprint": "driver",
            "join": "live",
        },
    )

__all__ = ["Elastic", "Given", "Live", "check_rule", "fingerprint", "join"]
