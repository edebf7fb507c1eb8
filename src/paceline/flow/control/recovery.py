# SPDX-License-Identifier: Apache-2.0
"""What the record holds of a register, and how its members come back to a server that was started again."""

from __future__ import annotations

import hmac
from dataclasses import replace
from typing import Any

from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import GivenUpError
from paceline.flow.control.messages import Generation, Place
from paceline.flow.control.state_machine import Register
from paceline.flow.control.worker_record import Person


def state(register: Register, now: float) -> dict[str, Any]:
    """For the record; JSON's terms."""
    return {
        "generation": register.generation.note(),
        "exchange": register.exchange,
        "committed_in": register.committed_in,
        "next_worker": register.next_worker,
        "people": [one.state() for one in register.people.values()],
        "fingerprint": register.fingerprint,
        "gone": [[worker, why] for worker, why in register.gone.items()],
        "finished": register.finished,
        "ended": register.ended,
        "run": register.run,
        "restores": [register.restores, register.restored_from],
        "books": register.books.state(now),
    }


def load(register: Register, said: dict[str, Any], now: float) -> None:
    """Go on from what `state` gave: its members are waited for, and nothing is leased before all have spoken."""
    register.generation = Generation.read(said["generation"])
    register.exchange, register.committed_in = said["exchange"], said["committed_in"]
    register.next_worker, register.fingerprint = said["next_worker"], said["fingerprint"]
    register.gone = {int(worker): str(why) for worker, why in said["gone"]}
    register.finished, register.ended = bool(said["finished"]), str(said["ended"])
    register.run = str(said.get("run", register.run))
    register.restores, register.restored_from = said.get("restores", [0, -1])
    register.books.load(said["books"], now)
    for one in said["people"]:
        place = Place.read(one["place"])
        register.people[place.worker] = Person(
            place, str(one["secret"]), now, bool(one["member"]), bool(one["holds"]), absent=now, told=int(one["told"])
        )
    known = set(register.people)
    register.broken = register.generation.number == 0 or not known >= set(register.generation.workers)
    if register.broken and register.generation.number:
        register.settle(now, "the control plane was started again")
    register.generation = replace(register.generation, exchange=register.exchange)


def known(register: Register, worker: int, secret: Any) -> Person:
    """The worker of this number that knows its secret; GivenUpError where there is none."""
    person = register.people.get(worker)
    if person is None:
        why = register.gone.get(worker, "it is not known here; was the control plane started without its record?")
        raise GivenUpError(f"worker {worker} was given up: {why}")
    if not isinstance(secret, str) or not hmac.compare_digest(person.secret.encode(), secret.encode()):
        raise GivenUpError(f"worker {worker} was given up: another process has its number")
    return person


def back(register: Register, person: Person, holding: int, started: int, marks: list[Mark], now: float) -> None:
    """A member has come back after the server was started again.

    Args:
        register: of the run.
        person: who it is.
        holding: the exchange of which it has the state, -1 for none.
        started: the exchange to which it has come.
        marks: what it holds of the data.
        now: the time.

    Raises:
        GivenUpError: it is ahead of the record.
    """
    if person.absent is None:
        raise GivenUpError(f"worker {person.worker} was given up: it was taken for dead, or came twice")
    if holding > register.exchange:
        raise GivenUpError(
            f"worker {person.worker} was given up: it holds exchange {holding}, the record of the control plane knows "
            f"{register.exchange} only; all must begin from a checkpoint"
        )
    person.absent, person.seen = None, now
    person.holds = person.holds or holding == register.exchange
    person.started = min(started, register.exchange + 1)
    register.books.holds(person.worker, marks)
    register.note("back", worker=person.worker, host=person.place.host)
    if person.member and not register.broken:
        register.say(person.worker, "generation", note=register.generation.note())
    if register.paused:
        saves = int(person.worker == register.saver)
        register.say(person.worker, "paused", numbers=(saves,), note=register.paused)
    if all(one.absent is None for one in register.people.values()):
        for one in register.people.values():
            register.say(one.worker, "news")
    register.call(now)
