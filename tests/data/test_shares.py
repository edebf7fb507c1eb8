# SPDX-License-Identifier: Apache-2.0
"""Batches that are dealt by shares, and dealt anew within an epoch."""

from __future__ import annotations

import random

import pytest

from paceline.data.sampling.split import EvenAssignment, Rounds, Shares, split_of


@pytest.mark.parametrize("seed", range(60))
def test_every_place_comes_once_however_often_shares_change(seed: int) -> None:
    """Workers take batches in any order; shares change where all have batches left."""
    dice = random.Random(seed)
    workers, batch, total = dice.randint(2, 6), dice.randint(1, 5), dice.randint(1, 400)
    cut = f"shares 0:{','.join('1' * workers)}", total, batch, workers
    own = [EvenAssignment(0, None, split_of(cut), rank, 0) for rank in range(workers)]
    seen, made, left = list[int](), [0] * workers, set(range(workers))
    while left:
        for _ in range(dice.randint(1, 15)):
            if left:
                rank = dice.choice(sorted(left))
                if (portion := own[rank].next(wait=True)) is None:
                    left.discard(rank)
                    continue
                made[rank] += 1
                assert batch < 4 or portion.count > 1 or total < 2 * workers * batch
                seen += [place for low, high in portion.places for place in range(low, high)]
        split = split_of(cut)
        assert isinstance(split, Shares)
        if len(left) == workers and (turn := split.next_turn(max(one.furthest for one in own))) is not None:
            counts = ",".join(str(dice.randint(1, 6)) for _ in range(workers))
            cut = f"{cut[0]} {turn}:{counts}", *cut[1:]
            for one in own:
                one.deal(split_of(cut))
    assert sorted(seen) == list(range(total))
    split = split_of(cut)
    assert [split.batches(rank) for rank in range(workers)] == made and len(split) == max(made)
    assert list(split.done(made)) == [(0, total)]


def test_shares_of_one_are_rounds_and_others_follow_their_counts() -> None:
    split, rounds = split_of(("shares 0:1,1,1 18:4,2,0", 54, 2, 3)), Rounds(54, 2, 3)
    assert all(split.part(k, r) == rounds.part(k, r) for k in range(3) for r in range(3))
    assert [split.batches(rank) for rank in range(3)] == [3 + 12, 3 + 6, 3]
    assert [split.part(3 + k, 0) for k in range(5)] == [(18, 20), (20, 22), (22, 24), (24, 26), (30, 32)]
    assert split.part(3, 1) == (26, 28) and split.part(3, 2) == (0, 0)


@pytest.mark.parametrize("seed", range(80))
def test_shares_become_equal_wherever_workers_are(seed: int) -> None:
    """Each place comes once, and all end after equally many batches where enough are left to catch up."""
    dice = random.Random(seed)
    workers, batch = dice.randint(2, 6), dice.randint(4, 8)
    total, counts = dice.randint(1, 400), [dice.randint(1, 6) for _ in range(workers)]
    cut = f"shares 0:{','.join(map(str, counts))}", total, batch, workers
    split = split_of(cut)
    had = [dice.randint(0, split.batches(rank)) for rank in range(workers)]
    made = [one + dice.choice([0, dice.randint(0, 20)]) for one in had]  # earlier passes included
    lacks = [max(made) - one for one in made]
    dealt = split_of((f"{cut[0]} had:{','.join(map(str, had))} lacks:{','.join(map(str, lacks))}", *cut[1:]))
    parts = [[dealt.part(number, rank) for number in range(dealt.batches(rank))] for rank in range(workers)]
    assert all(
        own[:n] == [split.part(k, r) for k in range(n)] for r, own, n in zip(range(workers), parts, had, strict=True)
    )
    assert sorted(place for own in parts for low, high in own for place in range(low, high)) == list(range(total))
    assert all(dealt.part(len(own), rank) == (0, 0) and len(dealt) >= len(own) for rank, own in enumerate(parts))
    assert list(dealt.done([len(own) for own in parts])) == [(0, total)]
    ends = [one + len(own) - n for one, own, n in zip(made, parts, had, strict=True)]
    assert sum(lacks) > sum(map(split.batches, range(workers))) - sum(had) or len(set(ends)) == 1
