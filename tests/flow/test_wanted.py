# SPDX-License-Identifier: Apache-2.0
"""What a member counts for a number of workers that grows, from hand-made exchanges; without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.communication.base import BLOCK
from paceline.flow.wanted import WantedWorkers
from paceline.rules.recipes import rule_from_text
from paceline.update.engine.blocks.outer_state import Diversity
from paceline.update.exchange.exchanger import ExchangeHeader, ExchangeSummary


def summary(workers: int, minibatches: int = 4, mean_norm: float = 0.0, leaving: bool = False) -> ExchangeSummary:
    """An exchange to which each worker brings a displacement of norm 1."""
    brings = minibatches > 0
    header = ExchangeHeader(1, BLOCK, brings, leaving, True, minibatches, 1.0, float(brings), 9, 0, mean_norm=mean_norm)
    return ExchangeSummary((header,) * workers)


def blocks(*diversities: Diversity) -> Any:
    """Fragments with these."""
    return SimpleNamespace(updates=[SimpleNamespace(numbers=SimpleNamespace(diversity=one)) for one in diversities])


def member(grow: str = "auto(threshold=0.5, blocks=2)", workers: int = 4, most: int = 64) -> WantedWorkers:
    one = WantedWorkers(rule_from_text(f"bmuf(grow={grow!r}, rate_exponent=0.5)"), most)
    one.renumber(workers, workers)
    return one


def test_twice_as_many_once_they_are_worth_it_for_blocks_enough() -> None:
    one, worth_two = member(), blocks(Diversity(smoothed=2**0.5))
    assert one.after(summary(4), worth_two, 0) == (4, pytest.approx(2))  # the first block
    one.advance(summary(4), 0)
    assert one.after(summary(4), worth_two, 0) == (8, pytest.approx(2))
    assert one.after(summary(4), blocks(Diversity(smoothed=1.4)), 0)[0] == 4
    assert one.after(summary(4), blocks(Diversity()), 0) == (4, 1.0)  # nothing is measured yet
    assert (one.number, one.minibatches) == (4, 16)  # asking changes nothing


def test_other_members_begin_to_count_anew() -> None:
    one, worth = member(), blocks(Diversity(smoothed=2.0))
    one.advance(summary(4), 0)
    one.renumber(3, 4)
    assert one.after(summary(3), worth, 0)[0] == 4  # one is missing: no more are asked for
    one.advance(summary(3), 0)
    one.renumber(4, 4)
    assert one.after(summary(4), worth, 0)[0] == 4
    one.advance(summary(4), 0)
    assert one.after(summary(4), worth, 0)[0] == 8


def test_fragments_share_their_minibatches_and_are_measured_together() -> None:
    one, halves = member(), blocks(Diversity(smoothed=1.0), Diversity(smoothed=3.5**0.5))
    for fragment in (0, 1, 0, 1):
        one.advance(summary(4), fragment)
    assert one.minibatches == 32
    assert one.after(summary(4), halves, 1) == (8, pytest.approx(2.25))


def test_stages_follow_the_minibatches_of_all() -> None:
    one = member("2:16, 3:1000", workers=2, most=3)
    one.advance(summary(2), 0)
    assert one.after(summary(2, minibatches=3), blocks(Diversity()), 0)[0] == 2
    assert one.after(summary(2), blocks(Diversity()), 0)[0] == 3


def test_a_resumed_run_goes_on_where_it_stood() -> None:
    """Its first two workers load the state of four; as four are there again, their blocks still count."""
    before, worth = member(), blocks(Diversity(smoothed=2.0))
    before.advance(summary(4), 0)
    resumed = WantedWorkers(rule_from_text("bmuf(grow='auto(threshold=0.5, blocks=2)')"), 64)
    resumed.renumber(2, 2)
    resumed.load(before.state())
    assert resumed.number == 4 and resumed.after(summary(2), worth, 0)[0] == 4
    resumed.renumber(4, 4)
    assert resumed.after(summary(4), worth, 0)[0] == before.after(summary(4), worth, 0)[0] == 8
    resumed.load(None)  # a checkpoint from before there was growth
    assert resumed.number == 4


def test_the_rate_follows_the_members_that_train() -> None:
    one = member(workers=4)
    assert one.rate_factor == 2.0
    one.renumber(1, 4)
    assert one.rate_factor == 1.0
    plain = WantedWorkers(rule_from_text("bmuf"), 64)
    plain.renumber(4, 0)
    assert plain.rate_factor == 1.0 and plain.after(summary(4), blocks(Diversity(smoothed=2.0)), 0) == (0, 4.0)
