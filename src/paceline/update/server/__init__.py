# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rules: a server inside the workers.

Each worker owns some shards of the parameters, and applies what all workers push to them (:mod:`.shard`).
:mod:`.engine` and :mod:`.client` are what a worker does at its steps. A service carries its requests
(:mod:`.protocol`) to the owners: sockets and threads between processes (:mod:`.socket_service`), events on a simulated
clock between virtual workers (:mod:`.simulated_service`). The same server answers in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.update.server.engine import Asynchronous
    from paceline.update.server.sharding import whole_optimizers
else:
    __getattr__, __dir__ = lazily(__name__, {"Asynchronous": "engine", "whole_optimizers": "sharding"})

__all__ = ["Asynchronous", "whole_optimizers"]
