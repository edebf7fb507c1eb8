# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: one directory each, safetensors and JSON, checksummed, written atomically.

::

    PATH/manifest.json           format, rule, size, and the sha256 sum of every other file
    PATH/global.safetensors      the global model; `safetensors.torch.load_file` gives a state dictionary
    PATH/rank-000.safetensors    rank 0's tensors (its model, optimizer, outer state, generators)
    PATH/rank-000.json           everything of rank 0 that is not a tensor

What training does not change is written once for all ranks, and for all steps (:mod:`.files`).

`run.save(PATH)` writes one (:mod:`.saving`); `attach(..., checkpoint=DIR)` keeps the newest few as steps in a directory
or below a URL (:mod:`.auto_checkpointer`, :mod:`.store`). Another number of workers reads the files of all ranks
(:mod:`.reshard`).
"""

from __future__ import annotations

from paceline.checkpoint.auto_checkpointer import AutoCheckpointer, ExchangePosition
from paceline.checkpoint.claim import new_run
from paceline.checkpoint.files import all_well, read_manifest
from paceline.checkpoint.loading import CheckpointFinder, FoundCheckpoint
from paceline.checkpoint.saving import save
from paceline.checkpoint.store import store_for

__all__ = [
    "AutoCheckpointer",
    "CheckpointFinder",
    "ExchangePosition",
    "FoundCheckpoint",
    "all_well",
    "new_run",
    "read_manifest",
    "save",
    "store_for",
]
