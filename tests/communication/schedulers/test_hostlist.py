# SPDX-License-Identifier: Apache-2.0
"""Slurm's lists of hosts. What stands here in `AS_SLURM` is what `scontrol show hostnames` said (22.05)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.communication.schedulers import expand
from paceline.errors import UnsupportedError

AS_SLURM = {"x": "x", "n[08-11]": "n08 n09 n10 n11", "a[9-11]": "a9 a10 a11", "a[1-2]b[3-4]": "a1b3 a1b4 a2b3 a2b4"}


@pytest.mark.parametrize("text", AS_SLURM)
def test_expands_as_slurm_does(text: str) -> None:
    assert expand(text) == AS_SLURM[text].split()


def test_text_after_brackets() -> None:
    assert expand("node[001-003,7],gpu-a[1-2]b") == ["node001", "node002", "node003", "node7", "gpu-a1b", "gpu-a2b"]


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20), st.integers(1, 5))
def test_every_number_is_there_with_its_zeros_and_in_order(numbers: list[int], digits: int) -> None:
    inside = [str(number).zfill(digits) for number in numbers]
    assert expand(f"a[{','.join(inside)}]-ib,z") == [*(f"a{number}-ib" for number in inside), "z"]


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "a[1", "a]1", "a[]", "a[3-1]", "a[1-5:2]", "a[b]", "a[[1]]", "a[1-99999999]", "a[1-999]" * 3],
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="not a list of hosts"):
        expand(text)
