# SPDX-License-Identifier: Apache-2.0
"""The control plane of elastic runs: who is a member, which exchanges are committed, and who has which data.

:class:`Control` lives in the launcher, a :class:`Member` in every worker.
"""

from paceline.control.client import Member
from paceline.control.errors import EXPELLED, GivenUpError, RefusedError
from paceline.control.server import Control
from paceline.control.terms import About, Generation, Place, Terms, Verdict

__all__ = [
    "EXPELLED",
    "About",
    "Control",
    "Generation",
    "GivenUpError",
    "Member",
    "Place",
    "RefusedError",
    "Terms",
    "Verdict",
]
