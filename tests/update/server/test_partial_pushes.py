# SPDX-License-Identifier: Apache-2.0
"""Pushes that only some shards have: who says so, when, and what is pushed alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.data.ledger.epoch_ledger import Question
from paceline.data.ledger.ledger import Ledger
from paceline.update.server.ledger_client import PartialPushes, PushedAlone
from paceline.update.server.membership import ServerMembership
from paceline.update.server.protocol import FrameKind
from paceline.update.server.shard import IncomingPush
from tests.update.server.test_takeover import shard

KEEPER, OWN, OTHER, LOST = range(4)


class Said(list[tuple[int, FrameKind, Any]]):
    """What a worker says, by receiver."""

    def __getitem__(self, rank: int) -> Any:  # type: ignore[override]
        def say(kind: FrameKind, numbers: tuple[int, ...], body: object = None, note: object = None) -> None:
            self.append((rank, kind, note))

        return SimpleNamespace(say=say)


@pytest.fixture
def worker() -> tuple[PartialPushes, Any, Said]:
    """Worker `OWN` of four, which owns shard 1; samples 0 to 4 of a push of `LOST` are in it."""
    members = ServerMembership(OWN, 4, {0: KEEPER, 1: OWN})
    own = shard(1)
    own.push(torch.zeros(4), IncomingPush(LOST, 1, 0, 2, marks=[(0, 0, 0, 4)]))
    server = SimpleNamespace(shards={1: own})
    context: Any = SimpleNamespace(membership=members, server=server, changed=threading.Condition(threading.RLock()))
    said = Said()
    return PartialPushes(context, said, Ledger()), context, said  # type: ignore[arg-type]


def test_an_owner_says_what_it_has_when_all_know_of_the_loss(worker: tuple[PartialPushes, Any, Said]) -> None:
    partial, context, said = worker
    partial.told(OTHER, LOST)  # before this worker has noticed
    context.membership.lost[LOST] = "killed"
    partial.report()
    assert said == [], "the keeper may still say that samples are done, to itself or to a shard"
    partial.told(KEEPER, LOST)
    assert list(said) == [(KEEPER, FrameKind.COVERS, [[LOST], [0, 0, 0, 4]])]


def test_a_second_loss_is_reported_again_to_the_new_keeper(worker: tuple[PartialPushes, Any, Said]) -> None:
    partial, context, said = worker
    for rank in (LOST, KEEPER):
        context.membership.lost[rank] = "killed"
        context.membership.take_over([shard for shard, owner in context.membership.owners.items() if owner == rank])
    partial.told(OTHER, LOST)
    assert said == []
    partial.told(OTHER, KEEPER)
    assert list(said) == [(OWN, FrameKind.COVERS, [[KEEPER, LOST], [0, 0, 0, 4]])]


def test_the_keeper_knows_when_all_living_owners_have_reported(worker: tuple[PartialPushes, Any, Said]) -> None:
    partial, context, _ = worker
    assert partial.known, "nobody is lost"
    context.membership.lost[LOST] = "killed"
    partial.reported(OWN, [[LOST], [0, 0, 0, 4]])
    partial.reported(KEEPER, [[LOST]])
    partial.reported(OTHER, [[]])
    assert not partial.known, "that of another worker is from before the loss"
    partial.reported(OTHER, [[LOST]])
    assert partial.known
    context.membership.lost[OTHER] = "killed"
    assert not partial.known


def test_what_shards_have_is_leased_by_itself() -> None:
    ledger = Ledger()
    ledger.ask(1, Question(0, 0, 12, unit=8))
    ledger.lost(1)
    ledger.pushed([(0, 0, 2, 4), (0, 0, 4, 6), (1, 0, 0, 12)])
    leases = [ledger.ask(2, Question(0, 0, 12, unit=8)) for _ in range(4)]
    assert leases == [(0, 0, 0, 2), (0, 0, 2, 6), (0, 0, 6, 8), (0, 0, 8, 12)]
    assert [ledger.is_pushed(lease) for lease in leases if lease is not None] == [False, True, False, False]


def test_a_minibatch_that_shards_have_is_pushed_alone() -> None:
    pushes: list[list[int]] = []
    now: list[int] = []

    def push_rest() -> None:
        pushes.append(list(now))
        now.clear()

    alone = PushedAlone(push_rest)
    alone.leased((0, 0, 2, 4))
    for begin in range(7):
        alone.hand_out([(0, 0, begin, begin + 1)])
        now.append(begin)
    assert [push for push in pushes if push] == [[0, 1], [2], [3]] and now == [4, 5, 6]


def test_a_push_that_comes_after_the_loss_is_not_applied() -> None:
    """The owner may have said already which samples it has."""
    one = shard(0)
    one.leave(2)
    before = one.anchor.clone()
    one.push(torch.ones(4), IncomingPush(2, 1, 0, 1, marks=[(0, 0, 0, 4)]))
    assert torch.equal(one.anchor, before) and one.marks() == []
    one.push(torch.ones(4), IncomingPush(1, 1, 0, 1, marks=[(0, 0, 0, 4)]))
    assert not torch.equal(one.anchor, before) and one.marks() == [(0, 0, 0, 4)]
