# SPDX-License-Identifier: Apache-2.0
"""Bugs that are planted: into the control plane, its record and its clients, and into whole runs; a storm has to find
each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from devtools.world.process import _ProcessDisk

from paceline.checkpoint.store import DirectoryStore
from paceline.flow.commit import CommittedExchange, ControlLedgerClient
from paceline.flow.control import recovery
from paceline.flow.control.client import ClientConnection
from paceline.flow.control.ledger import ControlLedger
from paceline.flow.control.recovery import GroupCommit
from paceline.flow.control.state_machine import StateMachine
from paceline.flow.joining import Joining
from paceline.flow.membership import ElasticMembership

Plant = Callable[[], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _instead(owner: Any, name: str, call: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _speaks_before_it_writes() -> Any:
    whole = GroupCommit._round

    def first(self: Any) -> None:
        while self._calls:
            self._calls.popleft()()
        whole(self)

    return _instead(GroupCommit, "_round", first)


def _stale_generation() -> Any:
    commit = StateMachine.commit

    def accepts(self: Any, worker: int, generation: int, *rest: Any) -> None:
        commit(self, worker, max(generation, self.generation.number), *rest)

    return _instead(StateMachine, "commit", accepts)


def _commits_with_the_first() -> Any:
    conclude = StateMachine.conclude

    def early(self: Any, now: float) -> None:
        living = self.members
        said = [one for one in living if one.commit is not None]
        if said and not self.broken:
            for one in living:
                one.commit = one.commit or replace(said[0].commit, marks=[], returned=[])
                self.roll.note(one)
        conclude(self, now)

    return _instead(StateMachine, "conclude", early)


def _forgets_who_died_after_its_commit() -> Any:
    conclude = StateMachine.conclude

    def forgets(self: Any, now: float) -> None:
        for worker in self.departed:
            self.ledger.abort(worker)
        conclude(self, now)

    return _instead(StateMachine, "conclude", forgets)


def _leases_before_all_are_back() -> Any:
    ask = StateMachine.ask

    def early(self: Any, *given: Any) -> None:
        absent, self.absent = self.absent, set()
        try:
            ask(self, *given)
        finally:
            self.absent = absent & set(self.workers)

    return _instead(StateMachine, "ask", early)


def _everybody_holds_the_state() -> Any:
    make = StateMachine.make

    def holds(self: Any, chosen: Any, *rest: Any) -> None:
        if any(one.holds for one in chosen):
            for one in chosen:
                one.holds = True
        make(self, chosen, *rest)

    return _instead(StateMachine, "make", holds)


def _resends_nothing() -> Any:
    reconnect = ClientConnection._reconnect

    def drops(self: Any) -> None:
        self._pending.clear()
        reconnect(self)

    return _instead(ClientConnection, "_reconnect", drops)


def _comes_back_without_its_leases() -> Any:
    back = recovery.back

    def without(machine: Any, record: Any, said: Any, marks: Any, now: float) -> None:
        back(machine, record, said, [], now)

    return _instead(recovery, "back", without)


def _denies_a_commit() -> Any:
    commit = StateMachine.commit

    def denies(self: Any, worker: int, generation: int, exchange: int, said: Any, now: float) -> None:
        if exchange == self.exchange and generation == self.committed_in:
            self.outbox.send(worker, "verdict", said.serial, (0,), self.generation.note())
        else:
            commit(self, worker, generation, exchange, said, now)

    return _instead(StateMachine, "commit", denies)


def _restart_forgets_the_last_exchange() -> Any:
    load = recovery.load

    def older(machine: Any, said: Any, now: float) -> None:
        load(machine, {**said, "exchange": max(0, said["exchange"] - 1)}, now)

    return _instead(recovery, "load", older)


MUTANTS: dict[str, Plant] = {
    "the record is not synced": lambda: _instead(_ProcessDisk, "sync", _nothing),
    "the record's folder is not synced": lambda: _instead(_ProcessDisk, "sync_folder", _nothing),
    "messages are sent before the record is written": _speaks_before_it_writes,
    "leases of lost workers are not freed": lambda: _instead(ControlLedger, "lost", _nothing),
    "a commit of a stale generation counts": _stale_generation,
    "an exchange is committed with the first commit": _commits_with_the_first,
    "who died after its commit is forgotten": _forgets_who_died_after_its_commit,
    "a restarted server leases before all are back": _leases_before_all_are_back,
    "a newcomer is taken for one that holds the state": _everybody_holds_the_state,
    "a client that reconnects resends nothing": _resends_nothing,
    "a worker comes back without its leases": _comes_back_without_its_leases,
    "a commit that was sent again is denied": _denies_a_commit,
    "a restart forgets the last exchange": _restart_forgets_the_last_exchange,
}
"""By what is wrong."""


def _applies_before_the_commit() -> Any:
    commit = ElasticMembership.commit

    def applied(self: Any, report: Any) -> Any:
        return commit(self, report) or self.generation

    return _instead(ElasticMembership, "commit", applied)


def _repeats_without_its_contribution() -> Any:
    again = CommittedExchange._again

    def empty(self: Any) -> None:
        again(self)
        self._given = [torch.zeros_like(given) for given in self._given]

    return _instead(CommittedExchange, "_again", empty)


def _joins_without_the_state() -> Any:
    take = Joining.take_given

    def empty(self: Any) -> None:
        if self.given is not None:
            self.put = lambda given: None
        take(self)

    return _instead(Joining, "take_given", empty)


def _passes_over_the_newest_step() -> Any:
    numbers = DirectoryStore.numbers
    return _instead(DirectoryStore, "numbers", lambda self: numbers(self)[:-1])


RUN_MUTANTS: dict[str, Plant] = {
    "an exchange is applied before its commit": _applies_before_the_commit,
    "a repeated exchange has lost the contribution": _repeats_without_its_contribution,
    "a joining worker does not load the state": _joins_without_the_state,
    "the newest step is passed over": _passes_over_the_newest_step,
    "a resumed run forgets which samples are done": lambda: _instead(ControlLedgerClient, "expect", _nothing),
}
"""Those that only whole runs have."""
