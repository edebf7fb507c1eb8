# SPDX-License-Identifier: Apache-2.0
"""Answers that a lost owner had sent, and that arrive after its successor was asked the same."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch

from paceline.data.ledger.epoch_ledger import Question
from paceline.data.ledger.ledger import Ledger
from paceline.update.server.protocol import PendingExchange, ShardRequest
from paceline.update.server.socket_service import SocketService

LOST, HEIR, READER = 2, 0, 1


def service_with(pending: PendingExchange) -> SocketService:
    """Only what waits for answers."""
    made: Any = SocketService.__new__(SocketService)
    made.context = SimpleNamespace(changed=threading.Condition(threading.RLock()))
    made.members, made._pending = SimpleNamespace(lost={LOST: "died"}), {pending.number: pending}
    service: SocketService = made
    return service


def test_what_the_heir_tells_of_the_ledger_does_not_go_by() -> None:
    """The lost keeper knew of more work than its heir has; with its answer in the heir's place, samples were lost."""
    lost, heir, reader = Ledger(), Ledger(), Ledger()
    for keeper in (lost, heir):
        assert keeper.ask(3, Question(0, 0, 100, 10, most=2)) is not None
    reader.learn(lost.news(READER))
    lost.done(3, [(0, 0, 0, 10)])  # and this push dies with it
    request = ShardRequest(0, 0, None, torch.zeros(4), 0)
    pending = PendingExchange(7, {0: request})
    service = service_with(pending)
    service.answered(7, 0, 12, 0, lost.news(READER), LOST)
    assert not pending.done
    service.answered(7, 0, 11, 0, heir.news(READER), HEIR)
    assert pending.done and request.version == 11
    reader.learn(request.news)
    assert reader.epochs.unfinished(0) == heir.epochs.unfinished(0)
    assert heir.epochs.unfinished(0)[0].total == 100
