# SPDX-License-Identifier: Apache-2.0
"""The engine follows the diversity of the workers' displacements, from what their headers tell."""

from __future__ import annotations

import math

import pytest

from paceline.communication.base import BLOCK
from paceline.rules.recipes import rule_from_text
from paceline.testing import check_rule
from paceline.update.engine.blocks.outer_state import BlockNumbers, Diversity
from paceline.update.exchange.exchanger import ExchangeHeader, ExchangeSummary
from tests.helpers import adam
from tests.update.engine.test_blocks import climb

SPEEDS = [2.0, -1.0, 2.0, 1.0]  # mean 1, mean of their norms 1.5


@pytest.mark.parametrize("more", ["", ", overlap=1"])
def test_a_block_is_amplified_by_the_blocks_before(more: str) -> None:
    """Without momentum the model moves by A^p d a block: by 1 in the first, and by 1.5 from the second on."""
    out = climb(f"bmuf(period=2, momentum=0, lr=1, amplify=1{more})", SPEEDS, [6] * 4)
    assert {tuple(end) for _, end in out} == {(2 * 1 + 2 * 1.5 + 2 * 1.5,)}


def test_unequal_blocks_are_weighed_as_their_displacements_are() -> None:
    """The last block of worker 0 is half as long: mean of (1 of weight 1/2, -2, 4, 2) is 4.5 / 3.5."""
    out = climb("bmuf(period=2, momentum=0, lr=1, amplify=1)", SPEEDS, [3, 4, 4, 4])
    half, whole = 2.0 * 1 / 2, [-2.0, 4.0, 2.0]
    mean = (half * 1.0 + sum(whole)) / 3.5
    assert out[0][1] == pytest.approx([2.0 + 1.5 * mean])


@pytest.mark.parametrize(
    "rule",
    [
        "bmuf_adam(period=4, amplify=0.5)",
        "bmuf_adam(period=4, amplify=0.5, fragments=2, overlap=1)",
        "bmuf_adam(period=4, amplify=0.5, codec='int8')",
    ],
)
def test_the_laws_hold(rule: str) -> None:
    """One worker is the program, all workers agree, a run repeats, and a resumed run has the same bits."""
    check_rule(rule, adam)


def header(norm: float, mean_norm: float, factor: float = 1.0) -> ExchangeHeader:
    return ExchangeHeader(1, BLOCK, True, False, True, 4, norm, factor, 4, 0, mean_norm=mean_norm)


def test_all_workers_take_the_mean_norm_of_one() -> None:
    """Machines may round a norm differently, and a joined worker has none; the first that tells one decides for all."""
    first = ExchangeSummary((header(1.0, 0.0), header(3.0, 0.0)))
    second = ExchangeSummary((header(1.0, 0.0), header(3.0, 1.6), header(2.0, 1.6000001)))
    assert Diversity().after(first).smoothed is None
    assert Diversity().after(first).then(first).after(second).smoothed == pytest.approx(2.0 / 1.6)


def test_a_header_survives_the_wire_and_one_of_before_can_be_read() -> None:
    sent = header(1.5, 0.25)
    assert ExchangeHeader.unpack(sent.row.tolist()) == sent
    assert ExchangeHeader.unpack(sent.row.tolist()[:10]) == header(1.5, 0.0)


def test_fewer_workers_are_worth_no_more_than_they_are() -> None:
    """Of 16 workers that were worth 14 four stay: worth 4, whatever the headers of the last exchange still tell."""
    found = Diversity(smoothed=math.sqrt(14), mean_of_norms=3.0, workers=16).among(4)
    assert found.effective == 4
    later = found.after(ExchangeSummary((header(1.0, 0.75),)))  # its ratio was 4, that of 16
    assert later.effective == pytest.approx(4)


def test_blocks_follow_the_number_of_workers() -> None:
    numbers = BlockNumbers(rule_from_text("bmuf(amplify=0.5)"), 16)
    numbers.diversity = Diversity(4.0, 3.0, 16)
    numbers.renumber(9)
    assert numbers.diversity == Diversity(3.0, 3.0, 9)
