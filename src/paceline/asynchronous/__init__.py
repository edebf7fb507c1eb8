# SPDX-License-Identifier: Apache-2.0
"""Floor 4, asynchronous rules: a server inside the workers.

Each worker owns a slice of the parameters, in pieces, and applies what the others push to it (:mod:`.piece`,
:mod:`.server`). What a worker does at its steps is in :mod:`.stream` and :mod:`.worker`; how its questions reach the
owners is a :class:`.service.Service`: sockets and threads between processes (:mod:`.threads`), events on a simulated
clock between virtual workers (:mod:`.clocked`). The same server answers in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.asynchronous.regroup import steps_at_owners, whole_optimizers
    from paceline.asynchronous.worker import Asynchronous
else:
    __getattr__, __dir__ = lazily(
        __name__, {"Asynchronous": "worker", "steps_at_owners": "regroup", "whole_optimizers": "regroup"}
    )

__all__ = ["Asynchronous", "steps_at_owners", "whole_optimizers"]
