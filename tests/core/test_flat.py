# SPDX-License-Identifier: Apache-2.0
"""Named tensors as flat fragments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.core.flat import (
    RUNNING,
    Fragment,
    averaged_buffers,
    flat_view,
    fragments,
    other_buffers,
    outer_dtype,
    trainable,
)
from paceline.errors import UnsupportedError


def one(*tensors: torch.Tensor) -> Fragment:
    (found,) = fragments("parameters", [(f"t{k}", t) for k, t in enumerate(tensors)])
    return found


def test_tensors_lie_end_to_end_in_order() -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.arange(4.0) + 10
    fragment = one(a, b)
    assert [(s.name, s.offset, s.end) for s in fragment.slots] == [("t0", 0, 6), ("t1", 6, 10)]
    assert fragment.whole().tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]
    assert fragment.read(4, 8, torch.empty(4)).tolist() == [4, 5, 10, 11]


def test_writing_reaches_the_tensors_and_only_the_range() -> None:
    a, b = torch.zeros(3), torch.zeros(2, 2)
    one(a, b).write(2, 5, torch.tensor([1.0, 2.0, 3.0]))
    assert a.tolist() == [0, 0, 1] and b.tolist() == [[2, 3], [0, 0]]


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.float32),
        (torch.complex128, torch.float64),
        (torch.int32, torch.int64),
    ],
)
def test_every_dtype_goes_there_and_back(dtype: torch.dtype, want: torch.dtype) -> None:
    tensor = (torch.arange(6).view(2, 3)).to(dtype)
    if dtype.is_complex:
        tensor = tensor + 1j
    fragment = one(tensor)
    flat = fragment.whole()
    assert flat.dtype == want == outer_dtype(dtype)
    assert fragment.numel == 6 * (2 if dtype.is_complex else 1)
    back = fragment.unflatten(flat)["t0"]
    assert back.dtype == dtype and torch.equal(back, tensor)
    other = torch.zeros_like(tensor)
    one(other).write(0, fragment.numel, flat)
    assert torch.equal(other, tensor)


def test_a_dtype_without_an_average_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="float8_e5m2"):
        outer_dtype(torch.float8_e5m2)


@pytest.mark.parametrize("shape", ["channels_last", "transposed"])
def test_dense_permutations_need_no_copy(shape: str) -> None:
    if shape == "channels_last":
        tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    else:
        tensor = torch.randn(4, 6).t()
    view = flat_view("w", tensor)
    assert view.data_ptr() == tensor.data_ptr() and view.numel() == tensor.numel()
    fragment = one(tensor)
    copy = fragment.unflatten(fragment.whole())["t0"]
    assert torch.equal(copy, tensor) and copy.stride() == tensor.stride()


def test_holes_in_memory_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"w of shape \(2, 2\) has strides"):
        flat_view("w", torch.zeros(4, 4)[::2, ::2])


def test_moved_tensors_are_followed() -> None:
    module = nn.Linear(2, 2)
    fragment = one(module.weight)
    module.weight.data = torch.full((2, 2), 7.0)
    fragment.refresh()
    assert fragment.whole().tolist() == [7] * 4


def test_tied_weights_once_and_frozen_ones_never() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    model["c"].weight.requires_grad_(False)
    assert [name for name, _ in trainable(model)] == ["a.weight", "a.bias", "b.bias", "c.bias"]


def test_only_running_statistics_are_averaged() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    model.register_buffer("flags", torch.tensor([True]))
    model.register_buffer("empty", torch.zeros(0))
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("gaps", torch.ones(3, 1).expand(3, 2))
    model.register_buffer("rows", torch.eye(2).to_sparse())
    assert [name for name, _ in averaged_buffers(model)] == list(RUNNING)
    assert [name for name, _ in other_buffers(model)] == ["mask", "flags", "count"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_finite_sees_one_bad_number(value: float) -> None:
    a = torch.randn(1000)
    assert one(a).finite()
    a[777] = value
    assert not one(a).finite()


def test_finite_is_not_fooled_by_an_overflow_of_its_sum() -> None:
    assert one(torch.full((10,), 3e38)).finite()
