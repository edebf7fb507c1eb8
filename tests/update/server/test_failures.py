# SPDX-License-Identifier: Apache-2.0
"""Who is declared lost, and whether the remaining workers may go on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.world import World
from paceline.errors import PeerLostError
from paceline.update.server.membership import Failures, Identity, ServerMembership, ServiceContext, identity
from paceline.update.server.shard import ShardServer


def failures_of_rank_3_of_4(
    identities: Sequence[Identity] = ([],) * 4, owners: Sequence[int] = ()
) -> tuple[Failures, ServiceContext]:
    transport: Any = SimpleNamespace(world=World(3, 4))
    nothing: Any = SimpleNamespace()
    members = ServerMembership(3, 4, dict(enumerate(owners)))
    context = ServiceContext(transport, ShardServer(3, {}, nothing), members, nothing, 60.0)
    return Failures(context, identities), context


@pytest.mark.parametrize("certain_of", [[], [0], [2]])
def test_what_another_worker_is_certain_of_counts_also_when_it_comes_late(certain_of: list[int]) -> None:
    """Ranks 0 and 2 die, and this worker is certain of neither: 1 and 3 are a half without the lowest rank."""
    failures, context = failures_of_rank_3_of_4()
    failures.declare_lost(0, "it has ended")
    for rank in certain_of:
        failures.told(rank, "its process has gone", gone=True)
    failures.declare_lost(2, "it has ended")
    assert set(context.membership.lost) == ({0, 2} if certain_of else {0})
    assert isinstance(context.failure, PeerLostError) == (not certain_of)


def test_what_another_worker_suspects_does_not_count() -> None:
    failures, context = failures_of_rank_3_of_4()
    failures.declare_lost(0, "it has ended")
    failures.told(0, "it has ended", gone=False)
    failures.declare_lost(2, "it has ended")
    assert isinstance(context.failure, PeerLostError)


def test_a_worker_finds_out_what_the_one_that_declared_the_loss_was_not_certain_of() -> None:
    """Its own connection ends, too; the process at the other end has gone, and it tells the others."""
    failures, context = failures_of_rank_3_of_4([[], [], [], []])
    told: list[tuple[int, str]] = []
    failures.on_gone = lambda rank, why: told.append((rank, why))
    failures.told(0, "it has ended", gone=False)
    failures.connection_ended(0, "reset")
    assert told == [] and context.failure is None, "that a process of another host has gone is not known"
    ended = [*identity()[:3], "0"]  # the process of that number began at another time
    failures, context = failures_of_rank_3_of_4([ended, [], [], []])
    failures.on_gone = lambda rank, why: told.append((rank, why))
    failures.told(0, "it has ended", gone=False)
    failures.connection_ended(0, "reset")
    failures.connection_ended(0, "reset")  # the other connection
    assert told == [(0, "it has ended")]
    failures.declare_lost(2, "it has ended")
    assert set(context.membership.lost) == {0, 2} and context.failure is None


@pytest.mark.parametrize(
    ("losses", "goes_on"),
    [((0,), True), ((0, 2), True), ((1, 2), False), ((2, 1), False), ((3, 0), None), ((1, 0), False)],
)
def test_neighbours_that_are_lost_end_the_run_by_name(losses: tuple[int, ...], goes_on: bool | None) -> None:
    """Each owner's only replica is at its neighbour: 0 at 1, 1 at 2, 2 at 3, 3 at 0."""
    failures, context = failures_of_rank_3_of_4(owners=[0, 1, 2, 3])
    moves: list[tuple[int, list[int]]] = []
    failures.on_loss = lambda rank, why, gone, moved: moves.append((rank, moved))
    for rank in losses:
        failures.declare_lost(rank, "it has ended", gone=True)
    if goes_on is None:  # a worker does not declare itself lost
        assert moves == [(0, [0])] and context.failure is None
    elif goes_on:
        assert moves == [(rank, [rank]) for rank in losses] and context.failure is None
        assert [context.membership.owners[rank] for rank in losses] == [rank + 1 for rank in losses]
    else:
        assert moves[-1] == (losses[1], []), "the others learn of the loss all the same"
        assert isinstance(context.failure, PeerLostError)
        assert "no other worker has a replica of its slices" in str(context.failure)
        assert f"rank {losses[0]}" in str(context.failure) and f"rank {losses[1]}" in str(context.failure)
