# SPDX-License-Identifier: Apache-2.0
"""The checkpoint state of an optimizer's gradient exchanges; the keys are the checkpoint's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.update.engine.blocks.chunks import restored
from paceline.update.engine.gradients.update import GradientUpdate

RESHARDED = ("order", "usual", "expected", "exchanges", "norms")
"""Keys whose values another number of workers takes from rank 0."""


def save(update: GradientUpdate) -> dict[str, Any]:
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
    """Load the result of `save`."""
    _load_counts(update, saved)
    update.buckets.clear()  # after a restore they may exist already
    if saved["order"]:
        update.buckets.build([int(index) for index in saved["order"]])
    update.scaling.kept_at = saved.get("scale")
    for chunk, kept in zip(update.buckets.chunks, saved["codec"], strict=True):
        chunk.state = restored(kept, chunk.bucket.wire.device)


def reshard(update: GradientUpdate, saved: Mapping[str, Any]) -> None:
    """Load the result of `save` on another number of workers: the counts, without the codecs' state."""
    _load_counts(update, saved)
    if len(saved["order"]) == len(update.named) and not update.buckets.chunks:
        update.buckets.build([int(index) for index in saved["order"]])
    for chunk in update.buckets.chunks:
        chunk.state = {}


def _load_counts(update: GradientUpdate, saved: Mapping[str, Any]) -> None:
    update.usual, update.expected_passes, update.exchanges = set(saved["usual"]), saved["expected"], saved["exchanges"]
    if update.norms is not None:  # absent if the run was saved without a guard
        update.norms.load(saved.get("norms") or [])
