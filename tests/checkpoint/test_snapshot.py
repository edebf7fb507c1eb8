# SPDX-License-Identifier: Apache-2.0
"""Copies in host memory: right, their own, and in the same place every time."""

from __future__ import annotations

import torch

from paceline.checkpoint.auto_checkpointer import Snapshot


def test_copies_are_their_own_and_memory_is_used_again() -> None:
    snapshot = Snapshot()
    base = torch.arange(12.0).view(3, 4)
    tensors = {"a": base.t(), "tied": base.t(), "n": torch.tensor(3)}
    first = snapshot.take(tensors)
    assert all(torch.equal(first[name], tensor) and first[name].is_contiguous() for name, tensor in tensors.items())
    assert first["a"].data_ptr() != first["tied"].data_ptr()
    place = first["a"].data_ptr()
    base += 1
    assert not torch.equal(first["a"], base.t())
    second = snapshot.take(tensors)
    assert second["a"].data_ptr() == place and torch.equal(second["a"], base.t())
