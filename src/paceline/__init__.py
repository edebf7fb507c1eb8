# SPDX-License-Identifier: Apache-2.0
"""paceline gives the training program you already have a cluster.

::

    run = paceline.attach(model, optimizer, rule="bmuf", period=16)
    for x, y in run.share(loader):
        ...
        optimizer.step()

`attach` hooks the optimizer's step; `Rule` says when workers exchange what, how it is written, over which route and how
it is applied; `simulate` runs a program with N virtual workers in one process.
"""

from __future__ import annotations

from paceline.adapters.arrays import attach_arrays
from paceline.attach import attach
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
)
from paceline.guards import Guard
from paceline.recipes import RECIPES, rule_from_text
from paceline.rule import Rule
from paceline.session import Run
from paceline.sim import Clock, simulate
from paceline.transport.tls import TLS
from paceline.version import __version__
from paceline.world import World

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
    "World",
    "__version__",
    "attach",
    "attach_arrays",
    "rule_from_text",
    "simulate",
]
