# SPDX-License-Identifier: Apache-2.0
"""The parts of a worker's socket service, for code that uses several of them."""

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
    """The parts of one service; `exchanges` are this worker's requests, `shards` serves those of other workers."""

    context: ServiceContext
    peers: Peers
    failures: Failures
    durability: Durability
    ledger_client: SocketLedgerClient
    exchanges: Exchanges
    shards: ShardService
    barriers: Barriers
