# SPDX-License-Identifier: Apache-2.0
"""The parts of a worker's socket service, for those that act on several of them."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.update.server.barriers import Barriers
from paceline.update.server.context import ServiceContext
from paceline.update.server.durability import Durability
from paceline.update.server.exchanges import Exchanges
from paceline.update.server.failures import Failures
from paceline.update.server.ledger_client import SocketLedgerClient
from paceline.update.server.peers import Peers
from paceline.update.server.shard_service import ShardService


@dataclass(frozen=True)
class ServiceParts:
    """The parts of one service.

    Attributes:
        context: what all of them share.
        peers: connections to other workers.
        failures: decides who is lost.
        durability: of this worker's pushes and of those to its shards.
        ledger_client: asks for data; keeps the ledger where this worker owns the first shard.
        exchanges: this worker's requests.
        shards: other workers' requests.
        barriers: where all workers wait for all.
    """

    context: ServiceContext
    peers: Peers
    failures: Failures
    durability: Durability
    ledger_client: SocketLedgerClient
    exchanges: Exchanges
    shards: ShardService
    barriers: Barriers
