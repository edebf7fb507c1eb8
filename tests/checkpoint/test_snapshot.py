# SPDX-License-Identifier: Apache-2.0
"""Copies in host memory: right, their own, and in the same place every time."""

from __future__ import annotations

import torch

from paceline.checkpoint.snapshot import Snapshot


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


def test_other_shapes_and_dtypes_get_other_memory() -> None:
    snapshot = Snapshot()
    snapshot.take({"a": torch.ones(3), "b": torch.ones(2)})
    taken = snapshot.take({"a": torch.ones(4), "b": torch.ones(2, dtype=torch.bfloat16)})
    assert taken["a"].shape == (4,) and taken["b"].dtype == torch.bfloat16
