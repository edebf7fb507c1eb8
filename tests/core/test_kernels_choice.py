# SPDX-License-Identifier: Apache-2.0
"""Where Triton's kernels serve; without Triton and without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import paceline
from paceline.core import kernels
from paceline.errors import MismatchError

WORKS = kernels._works
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if Triton were installed, and nothing were known of it yet."""
    monkeypatch.setattr(kernels, "_installed", lambda: True)
    monkeypatch.setattr(kernels, "_works", lambda: True)
    kernels._found.cache_clear()
    yield
    kernels._found.cache_clear()


def test_kernels_are_for_cuda_tensors() -> None:
    assert not kernels.serve(torch.zeros(4))
    assert kernels.arithmetic([CPU]) == "torch"
    assert kernels.arithmetic([CPU, CUDA]) == "triton"
    assert kernels.arithmetic([]) == "torch"


def test_one_setting_switches_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TRITON", "0")
    assert kernels.arithmetic([CUDA]) == "torch"


def test_without_triton_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    assert kernels.arithmetic([CUDA]) == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels may work")
def test_a_triton_that_does_not_work_is_told_once_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_works", WORKS)
    with pytest.warns(UserWarning, match="PACELINE_TRITON=0"):  # there is no GPU, or no Triton
        assert kernels.arithmetic([CUDA]) == "torch"
    assert kernels.arithmetic([CUDA]) == "torch"


def test_workers_of_different_arithmetic_are_refused_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their models would differ in the last bit after the first block."""

    def program() -> None:
        model = nn.Linear(2, 2)
        paceline.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "bmuf").close()

    found = iter(["triton", "torch"])
    monkeypatch.setattr(kernels, "arithmetic", lambda devices: next(found))
    with pytest.raises(MismatchError, match="PACELINE_TRITON=0 turns"):
        paceline.simulate(program, 2)
