# SPDX-License-Identifier: Apache-2.0
"""Who is judged by held-out losses, what a worker votes, and what the votes decide."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

import paceline
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary, to_bits
from paceline.update.exchange.judging import FIRST, Evidence, Finding, H, Losses, choose, tally, with_waiting_dropped
from paceline.update.exchange.kind import ExchangeKind
from paceline.update.exchange.outliers import Guard

FULL = ExchangeHeader(1, ExchangeKind.block(0), True, False, True, 4, 1.0, 1.0, 4, 0)
NOTHING = replace(FULL, brings=False, minibatches=0, norm=0.0, factor=0.0)
SUSPECT = replace(FULL, suspect=True)


def headers(*rows: ExchangeHeader) -> ExchangeSummary:
    return ExchangeSummary(tuple(rows))


def seen(*values: float, against: float = 0.0) -> Evidence:
    evidence = Evidence()
    evidence.load([values, [[1, against]]])
    return evidence


QUIET = [0.0] * FIRST
SPREAD = [-1.0, 1.0] * FIRST  # the values below the median lie 1 below it
DEVIATION = 1.4826 * (1 + 8 / 32)  # of these


# -- a header says who is a suspect ------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [FULL, SUSPECT, replace(SUSPECT, usual=False, watched=True, merges=True)])
def test_a_header_arrives_as_it_was_sent(header: ExchangeHeader) -> None:
    assert ExchangeHeader.unpack(header.row.tolist()) == header


def test_a_header_of_a_run_without_suspects_has_the_bits_that_it_had() -> None:
    assert FULL.row.tolist()[4] == 0b11 and SUSPECT.row.tolist()[4] == 0b10011


# -- what a worker votes -----------------------------------------------------------------------------------------------


def losses_of(deltas: list[float], judged: int, start: float = 10.0) -> Losses:
    """L = theta on a line: the loss of a mean is the mean of the losses."""
    others = [d for rank, d in enumerate(deltas) if rank != judged]
    return Losses(start, start + sum(others) / len(others), start + sum(deltas) / len(deltas))


def found(evidence: Evidence, delta: float, scale: float = 1.0, suspect: bool = False) -> float:
    """S of member 1 after a judgement, where it brings `delta` and three others bring -1."""
    losses = losses_of([scale * d for d in (-1.0, delta, -1.0, -1.0)], judged=1)
    return evidence.find(1, losses, 0.25, scale, suspect).evidence


def test_on_a_line_exactly_what_makes_the_loss_worse_by_itself_is_evidence() -> None:
    """e = w (p - p_i), so it turns where d_i neither helps nor harms, however little noise there is."""
    for delta, harmful in ((-2.0, False), (-1.0, False), (-0.001, False), (0.001, True), (1.0, True)):
        losses = losses_of([-1.0, delta, -1.0, -1.0], judged=1)
        assert losses.with_it - losses.without == pytest.approx((1.0 + delta) / 4)
        assert found(seen(*QUIET, against=1.0), delta) == (3.5 if harmful else 0.0), delta


def test_evidence_grows_by_the_deviations_above_the_drift() -> None:
    """x = 1 + delta here, and the median is 0."""
    for delta in (0.5, 1.0, 3.0, 6.0):
        assert found(seen(*SPREAD), delta) == pytest.approx(max(0.0, (1 + delta) / DEVIATION - 1.5))
    assert found(seen(*SPREAD), 50.0) == 2.5  # no single judgement leaves a member out
    assert found(seen(*SPREAD, against=2.5), 50.0) == found(seen(*SPREAD, against=4.0), 50.0) == 5.0
    assert found(seen(*SPREAD, against=2.5), -1.0) == 1.0 and found(seen(*SPREAD), -1.0) == 0.0


def test_harmful_members_of_before_do_not_hide_in_the_noise_that_they_made() -> None:
    """The lower half tells the spread: a quarter of the values may be of a bad member."""
    honest = [statistics.NormalDist().inv_cdf((k + 0.5) / 36) for k in range(36)]
    clean = seen(*honest).deviations(20.0)
    assert clean == pytest.approx(20.0 / (1 + 8 / 36), rel=0.1)
    assert seen(*honest, *[20.0] * 12).deviations(20.0) > 0.6 * clean


def test_a_learning_rate_that_is_multiplied_does_not_change_the_evidence() -> None:
    for scale in (1e-2, 1.0, 1e2):
        assert found(seen(*SPREAD), 4.0, scale) == pytest.approx(5.0 / DEVIATION - 1.5)


def test_a_suspect_stays_out_until_it_passes() -> None:
    """Also where this worker does not know what was found against it."""
    for known in (0.0, 5.0):
        evidence = seen(*SPREAD, against=known)
        assert found(evidence, 10.0, suspect=True) == 5.0
        assert found(evidence, -1.0, suspect=True) == max(known, 3.5) - 1.5


def test_before_there_are_enough_judgements_only_a_loss_that_is_no_number_decides() -> None:
    evidence = seen(*QUIET[:9])
    assert found(evidence, 1e6) == 0.0
    for loss in (math.inf, math.nan):
        assert evidence.find(1, Losses(1.0, 0.5, loss), 0.25, 1.0, False).evidence == 5.0
        assert evidence.find(1, Losses(1.0, math.nan, loss), 0.25, 1.0, False).evidence == 0.0
        assert evidence.find(1, Losses(1.0, math.nan, 0.5), 0.25, 1.0, False).evidence == 0.0


def test_rounding_is_no_harm() -> None:
    for harm, evidence in ((1e-6, 0.0), (1e-5, 2.5)):
        assert seen(*QUIET).find(1, Losses(1.0, 1.0, 1.0 + harm), 0.25, 1.0, False).evidence == evidence


def test_what_a_worker_has_seen_is_saved_and_loaded() -> None:
    evidence, other = seen(*SPREAD, against=2.0), Evidence()
    other.load(evidence.state())
    assert other.state() == evidence.state() == [SPREAD, [[1, 2.0]]]
    other.keep(Finding(2, math.nan, 5.0), drawn=True)
    other.keep(Finding(3, 7.0, 1.0), drawn=False)
    assert other.state() == [SPREAD, [[1, 2.0], [2, 5.0], [3, 1.0]]]
    other.keep(Finding(3, 7.0, 0.0), drawn=True)
    assert other.state()[0] == [*SPREAD, 7.0]
    other.mix()
    assert other.state() == [[*SPREAD, 7.0], []]
    other.clear()
    assert other.state() == [[], []]


def test_honest_noise_is_hardly_ever_taken_for_harm() -> None:
    """A hundred trainings of two hundred judgements, where every contribution is as likely to harm as to help."""
    dice, alarms = random.Random(1), 0
    for _ in range(100):
        evidence = Evidence()
        for turn in range(200):
            x = dice.gauss(0.0, 1.0)
            one = evidence.find(turn % 4, Losses(0.0, 0.0, 0.25 * x), 0.25, 1.0, False)
            evidence.keep(one, drawn=True)
            alarms += one.evidence >= H
    assert alarms <= 10  # of 20,000


@pytest.mark.parametrize("shift", [3.0, 5.0])
def test_a_shift_of_some_deviations_is_found_within_a_few_judgements(shift: float) -> None:
    dice, needed = random.Random(2), []
    for _ in range(200):
        evidence, count = Evidence(), 1
        evidence.load([[dice.gauss(0.0, 1.0) for _ in range(32)], []])

        def judge(evidence: Evidence = evidence) -> Finding:
            return evidence.find(1, Losses(0.0, 0.0, 0.25 * dice.gauss(shift, 1.0)), 0.25, 1.0, False)

        while (one := judge()).evidence < H and count < 100:
            evidence.keep(one, drawn=False)
            count += 1
        needed.append(count)
    assert statistics.median(needed) <= 2 + 5 / (shift - 2.0)


# -- who is judged -----------------------------------------------------------------------------------------------------


def test_the_first_exchanges_and_then_every_sixteenth_judge_somebody() -> None:
    judging = [k for k in range(100) if choose(headers(*[FULL] * 4), k, 16) is not None]
    assert judging == [*range(FIRST), 16, 32, 48, 64, 80, 96]


def test_all_members_come_to_be_judged_in_turn_and_by_lot() -> None:
    """Every second time in turn, whatever the sums are; else the sum draws, so that each has the same chance."""
    summary, in_turn, drawn = headers(*[FULL] * 5), [], []
    for number in range(16, 16 * 2000, 16):
        choice = choose(summary, number, 16)
        assert choice is not None and choice.drawn
        ranks = {choice.rank(checksum) for checksum in range(200)}
        if len(ranks) == 1:
            in_turn.append(ranks.pop())
        else:
            assert ranks == set(range(5))
            drawn.append(choice.rank(number * number))
    assert all(sorted(in_turn[k : k + 5]) == list(range(5)) for k in range(0, 500, 5))
    assert all(160 < drawn.count(rank) < 240 for rank in range(5))  # of 1000; five standard deviations are 63


def test_who_brings_nothing_is_not_judged() -> None:
    choice = choose(headers(FULL, NOTHING, FULL, replace(FULL, factor=0.0)), 0, 16)
    assert choice is not None and choice.ranks == (0, 2)
    assert choose(headers(FULL, NOTHING, NOTHING), 0, 16) is None  # there is nothing to compare with
    assert choose(headers(FULL, FULL), 0, 16) is None  # no majority of others


def test_a_suspect_is_judged_in_each_exchange_that_draws_nobody_and_waits_in_others() -> None:
    for number in range(16, 100):
        rows = (FULL, FULL, SUSPECT, FULL, SUSPECT)
        summary = headers(*(replace(h, sequence=number + 1) for h in rows))
        choice, dropped = choose(summary, number, 16), with_waiting_dropped(summary, number, 16)
        assert choice is not None
        out = [rank for rank, h in enumerate(dropped.headers) if not h.factor]
        if number % 32 == 0:  # every second draw; else its place is the suspects'
            assert choice.drawn and choice.ranks == (0, 1, 3) and out == [2, 4]
        else:
            assert not choice.drawn and choice.ranks == ((4, 2)[number % 2],) and out == [(2, 4)[number % 2]]
        assert dropped.left_out == out
        assert choose(dropped, number, 16) == choice  # the same from the headers that are left


def test_who_is_watched_counts_and_is_judged_in_each_exchange_that_draws_nobody() -> None:
    watched = replace(FULL, watched=True)
    for number in range(16, 100):
        summary = headers(FULL, FULL, watched, FULL)
        choice = choose(summary, number, 16)
        assert choice is not None and with_waiting_dropped(summary, number, 16) is summary
        assert choice.ranks == ((0, 1, 2, 3) if number % 32 == 0 else (2,)) and choice.drawn is (number % 32 == 0)


def test_with_audits_at_every_exchange_suspects_are_judged_as_well() -> None:
    choices = [choose(headers(FULL, FULL, SUSPECT, FULL), number, 1) for number in range(40)]
    assert [choice is not None and choice.drawn for choice in choices] == [True, False] * 20


def test_suspects_that_alone_have_work_are_judged_in_turn() -> None:
    judged = []
    for sequence in range(4):  # the number of the block stays while nothing is taken
        summary = headers(*(replace(h, sequence=sequence) for h in (SUSPECT, NOTHING, SUSPECT)))
        choice = choose(summary, 16, 16)
        assert choice is not None and not choice.drawn
        judged.append(choice.rank(5))
        assert choose(with_waiting_dropped(summary, 16, 16), 16, 16) == choice
    assert judged == [0, 2, 0, 2]


def test_among_two_workers_a_suspect_is_taken() -> None:
    summary = headers(SUSPECT, FULL)
    assert with_waiting_dropped(summary, 16, 16) is summary and choose(summary, 17, 16) is None


# -- the votes ---------------------------------------------------------------------------------------------------------


def ballot(*votes: int) -> list[list[int]]:
    return [[vote, to_bits(2.0 + rank), to_bits(1.0)] for rank, vote in enumerate(votes)]


@pytest.mark.parametrize(
    ("votes", "left_out", "watched"),
    [
        ((0, 2, 2, 2), True, True),
        ((0, 2, 2, 0), True, True),
        ((2, 2, 0, 0), False, False),  # the judged one's own vote does not count
        ((0, 2, 2, 0, 0), False, False),  # half is no majority
        ((0, 2, 2, 1, 0), False, True),  # who is against is for watching as well
        ((0, 1, 1, 1), False, True),
        ((0, 2, 2), True, True),
        ((0, 2, 1), False, True),
        ((0, 2, 0), False, False),
    ],
)
def test_more_than_half_of_the_others_decide(votes: tuple[int, ...], left_out: bool, watched: bool) -> None:
    found = tally(ballot(*votes), 0, 0)
    assert (found.left_out, found.watched, found.anew) == (left_out, watched, False)
    assert (found.against, found.voters) == (votes[1:].count(2), len(votes) - 1)


def test_the_losses_that_are_told_are_the_voters_medians() -> None:
    found = tally(ballot(0, 2, 2, 2), 2, 0)
    assert found.losses == (3.0, 1.0)
    assert str(found) == "held-out loss 3 with it and 1 without it, so 2 of 3 other workers"


@pytest.mark.parametrize(("workers", "most"), [(3, 1), (4, 1), (5, 2), (6, 2), (7, 3)])
def test_half_of_the_workers_are_never_left_out(workers: int, most: int) -> None:
    for suspects in range(most + 1):
        found = tally(ballot(*[2] * workers), 0, suspects)
        assert found.left_out is (suspects + 1 <= most) and found.anew is (not found.left_out)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: Guard(audit_every=0),
        lambda: Guard(audit_every=True),
        lambda: Guard(held_out=0.5),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(paceline.UnsupportedError, match="guard"):
        make()


def test_workers_compare_whether_there_is_a_function_and_not_which() -> None:
    one, other = Guard(held_out=lambda: 1.0), Guard(held_out=lambda: 2.0)
    assert str(one) == str(other) != str(Guard()) and one == other
