# SPDX-License-Identifier: Apache-2.0
"""Bugs that are planted into the server of asynchronous rules; a storm over it has to find each."""

from __future__ import annotations

from typing import Any

from devtools.storm.mutants import Plant, _instead, _nothing

from paceline.data.ledger.ledger import Ledger
from paceline.update.server.durability import Replicas, UnsafePushes
from paceline.update.server.ledger_client import PartialPushes, PushedAlone, SocketLedgerClient
from paceline.update.server.membership import Quorum
from paceline.update.server.shard import ParameterShard, PushNumbers, ShardServer


def _applies_again() -> Any:
    def again(self: PushNumbers, sender: int, number: int, marks: Any) -> bool:
        self.applied[sender] = max(number, self.applied.get(sender, 0))
        return True

    return _instead(PushNumbers, "is_new", again)


def _forgets_samples() -> Any:
    is_new = PushNumbers.is_new
    return _instead(PushNumbers, "is_new", lambda self, sender, number, marks: is_new(self, sender, number, ()))


def _safe_at_once() -> Any:
    def at_once(self: Any, shard: int, sender: int) -> tuple[int, int]:
        return int(self._server.shards[shard].numbered.applied.get(sender, 0)), 0

    return _instead(Replicas, "safe", at_once)


def _empty_handed_heir() -> Any:
    def without(self: Any, number: int) -> int:
        self.shards[number] = shard = self._make(number)
        for rank in self.gone:
            shard.leave(rank)
        return int(shard.version)

    return _instead(ShardServer, "adopt", without)


def _stale_replica() -> Any:
    def first(self: Any, about: dict[str, Any], row: Any) -> None:
        self._replicas.setdefault(int(about["piece"]), (about, row))

    return _instead(ShardServer, "keep_replica", first)


def _restores_without_numbers() -> Any:
    restore = ParameterShard.restore

    def forgets(self: Any, about: dict[str, Any], row: Any) -> None:
        restore(self, {**about, "numbered": {}}, row)

    return _instead(ParameterShard, "restore", forgets)


def _leases_before_reports() -> Any:
    lost = SocketLedgerClient.lost

    def at_once(self: Any, rank: int, kept: bool = False) -> None:
        lost(self, rank, kept)
        self._unreported.clear()

    return _instead(SocketLedgerClient, "lost", at_once)


SERVER_MUTANTS: dict[str, Plant] = {
    "a push that is sent again is applied again": _applies_again,
    "a push counts before it is replicated": _safe_at_once,
    "pushes are not sent again to the heir": lambda: _instead(UnsafePushes, "again", lambda *_: []),
    "an heir begins without the replica": _empty_handed_heir,
    "an heir has the first replica for ever": _stale_replica,
    "a replica does not say which pushes it holds": _restores_without_numbers,
    "samples of a push are not remembered": _forgets_samples,
    "a minority goes on": lambda: _instead(Quorum, "missed", lambda *_: True),
    "a new keeper leases before all have reported": _leases_before_reports,
    "samples that some shards have are leased with others": lambda: _instead(Ledger, "pushed", _nothing),
    "minibatches that some shards have are pushed with others": lambda: _instead(PushedAlone, "hand_out", _nothing),
    "the keeper leases before it knows what shards have": lambda: _instead(PartialPushes, "known", True),
    "leases of a lost worker are not returned": lambda: _instead(Ledger, "lost", _nothing),
}
"""By what is wrong."""
