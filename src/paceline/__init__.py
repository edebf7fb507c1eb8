# SPDX-License-Identifier: Apache-2.0
"""paceline gives the training program you already have a cluster.

::

    run = paceline.attach(model, optimizer, rule="bmuf", period=16)
    for x, y in run.share(loader):
        ...
        optimizer.step()

`attach` hooks the optimizer's step; a `Rule` is five choices; `launch` runs N processes, `simulate` N virtual workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily
from paceline.errors import (
    CacheError,
    CheckpointError,
    ClosedError,
    CorruptFileError,
    DataError,
    DesyncError,
    MismatchError,
    NonFiniteError,
    NotServedError,
    PacelineError,
    PeerLostError,
    RuleError,
    UnsupportedError,
    WorkerFailedError,
)
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.communication.sockets.tls import TLS
    from paceline.core.world import World
    from paceline.doors.adapters.arrays import attach_arrays
    from paceline.forecast.sim.clock import Clock
    from paceline.forecast.sim.simulate import simulate
    from paceline.rules.recipes import RECIPES, rule_from_text
    from paceline.rules.rule import Rule
    from paceline.run.attach import attach
    from paceline.run.launch import launch
    from paceline.run.run import Run
    from paceline.update.exchange.outliers import Guard
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "RECIPES": "rules.recipes",
            "TLS": "communication.sockets.tls",
            "Clock": "forecast.sim.clock",
            "Guard": "update.exchange.outliers",
            "Rule": "rules.rule",
            "Run": "run.run",
            "World": "core.world",
            "attach": "run.attach",
            "launch": "run.launch",
            "attach_arrays": "doors.adapters.arrays",
            "rule_from_text": "rules.recipes",
            "simulate": "forecast.sim.simulate",
        },
    )

__all__ = [
    "RECIPES",
    "TLS",
    "CacheError",
    "CheckpointError",
    "Clock",
    "ClosedError",
    "CorruptFileError",
    "DataError",
    "DesyncError",
    "Guard",
    "MismatchError",
    "NonFiniteError",
    "NotServedError",
    "PacelineError",
    "PeerLostError",
    "Rule",
    "RuleError",
    "Run",
    "UnsupportedError",
    "WorkerFailedError",
    "World",
    "__version__",
    "attach",
    "attach_arrays",
    "launch",
    "rule_from_text",
    "simulate",
]
