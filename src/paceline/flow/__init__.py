# SPDX-License-Identifier: Apache-2.0
"""Block rules whose workers come and go while the others go on.

The control plane (:mod:`paceline.flow.control`) says who is a member and which exchange counts; the workers' own
connections carry the numbers (:mod:`paceline.communication.ring`). An exchange is made until all members that live have
all of it, and only then applied, so that whoever dies in the middle of one takes nothing with it: the others make it
once more among themselves, from what they hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.flow.engine import Elastic, check_rule, fingerprint
    from paceline.flow.membership import Live, join
    from paceline.flow.state_transfer import Given
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "Elastic": "engine",
            "Given": "state_transfer",
            "Live": "membership",
            "check_rule": "engine",
            "fingerprint": "engine",
            "join": "membership",
        },
    )

__all__ = ["Elastic", "Given", "Live", "check_rule", "fingerprint", "join"]
