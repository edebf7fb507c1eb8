# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of an optimizer's gradient exchanges; the keys are its format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.update.engine.blocks.chunks import restored
from paceline.update.engine.gradients.update import GradientUpdate

RESHARDED = ("order", "usual", "expected", "exchanges", "norms")
"""Keys of which another number of workers takes over rank 0's values."""


def save(update: GradientUpdate) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {
        "order": update.buckets.order,
        "usual": sorted(update.usual),
        "expected": update.expected_passes,
        "exchanges": update.exchanges,
        "codec": [dict(chunk.state) for chunk in update.buckets.chunks],
        "scale": update.scaling.kept_at,
        "norms": update.norms.state() if update.norms is not None else [],
    }


def load(update: GradientUpdate, saved: Mapping[str, Any]) -> None:
    """Put back what `save` gave."""
    _load_counts(update, saved)
    update.buckets.clear()  # a run that goes back may have built them
    if saved["order"]:
        update.buckets.build([int(index) for index in saved["order"]])
    update.scaling.kept_at = saved.get("scale")
    for chunk, kept in zip(update.buckets.chunks, saved["codec"], strict=True):
        chunk.state = restored(kept, chunk.bucket.wire.device)


def reshard(update: GradientUpdate, saved: Mapping[str, Any]) -> None:
    """Take over what `save` gave among another number of workers: the counts, and no codec's state."""
    _load_counts(update, saved)
    if len(saved["order"]) == len(update.named) and not update.buckets.chunks:
        update.buckets.build([int(index) for index in saved["order"]])
    for chunk in update.buckets.chunks:
        chunk.state = {}


def _load_counts(update: GradientUpdate, saved: Mapping[str, Any]) -> None:
    update.usual, update.expected_passes, update.exchanges = set(saved["usual"]), saved["expected"], saved["exchanges"]
    if update.norms is not None:  # a run that was saved without a guard has none to give
        update.norms.load(saved.get("norms") or [])
