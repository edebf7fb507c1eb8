# SPDX-License-Identifier: Apache-2.0
"""Pushes that only some shards have: which samples are in them, so that they are trained on again by themselves.

The last push of a lost worker may be in some shards only, and nobody else has its values. Its samples are leased again,
and the shards that have them skip them. A shard can skip only a whole push. So a push must not mix such samples with
others: their leases hold nothing else, and each minibatch of them is pushed alone.

Which samples these are, their owners say, when the lost worker's pushes can reach no shard any more. So after a loss

1. every worker tells every other one of it, and takes no push of the lost worker from then on;
2. when a worker has heard that from all others, it tells the keeper of the ledger which samples are in its shards. What
   the others had said until then, and to a keeper that is lost, is in these shards, or its samples are still held;
3. the keeper leases nothing until all have done so.

It is the flush of virtual synchrony (K. Birman and T. Joseph, SOSP 1987), for the samples only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from paceline.data.ledger.epoch_ledger import Mark, by_epoch
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges
from paceline.update.server.context import ServiceContext
from paceline.update.server.frames import FrameKind
from paceline.update.server.peers import Peers
from paceline.update.server.shard import LEDGER_SHARD


class PartialPushes:
    """What the living workers say after a loss.

    Args:
        context: of the service.
        peers: the connections.
        ledger: of this worker; used where it is the keeper.
    """

    def __init__(self, context: ServiceContext, peers: Peers, ledger: Ledger) -> None:
        self._context, self._peers, self._ledger = context, peers, ledger
        self._heard: defaultdict[int, set[int]] = defaultdict(set)  # worker -> the losses that it has reported
        self._reported: defaultdict[int, set[int]] = defaultdict(set)  # owner -> the losses before its last report

    def told(self, sender: int, rank: int) -> None:
        """Worker `sender` has reported that `rank` is lost."""
        with self._context.changed:
            self._heard[sender].add(rank)
            self.report()

    def report(self) -> None:
        """Tell the keeper which samples are in this worker's shards, if all know of all losses; `changed` is held."""
        members = self._context.membership
        lost, others = set(members.lost), [rank for rank in members.live if rank != members.rank]
        if lost and all(self._heard[rank] >= lost for rank in others):
            shards = list(self._context.server.shards.values())
            samples = by_epoch(mark for shard in shards for mark in shard.marks())
            marks = [[*key, begin, end] for key, places in samples.items() for begin, end in places]
            self._peers[members.owners[LEDGER_SHARD]].say(FrameKind.COVERS, (), note=[sorted(lost), *marks])

    # -- the keeper, under the ledger's lock --------------------------------------------------------

    def reported(self, owner: int, note: Sequence[Sequence[int]]) -> None:
        """Take what `owner` has said."""
        self._ledger.pushed(note[1:])
        self._reported[owner] = set(note[0])

    @property
    def known(self) -> bool:
        """Whether all owners have reported since the last loss."""
        members = self._context.membership
        lost = set(members.lost)
        return all(self._reported[rank] >= lost for rank in members.live)


class PushedAlone:
    """The leases of this worker that are pushed alone.

    Args:
        push_rest: pushes all work that is not pushed.
    """

    def __init__(self, push_rest: Callable[[], None]) -> None:
        self._push_rest = push_rest
        self._leased: defaultdict[tuple[int, int], Ranges] = defaultdict(Ranges)
        self._before = False

    def leased(self, mark: Mark) -> None:
        """Each minibatch of these places is pushed alone."""
        self._leased[mark[:2]].add(*mark[2:])

    def hand_out(self, marks: Sequence[Mark]) -> None:
        """The program gets a batch of these places next: push what must not be mixed with it."""
        alone = sum(self._leased[loader, epoch].remove(begin, end) for loader, epoch, begin, end in marks) > 0
        if alone or self._before:
            self._push_rest()
        self._before = alone
