# SPDX-License-Identifier: Apache-2.0
"""Who is to blame when an exchange fails.

A connection that ended names its worker. A deadline that passed names nobody: in a ring, each waits for its neighbour,
who waits as well. So all break off and say how far they had come. Who says nothing did not answer; who says that it has
not come to the exchange yet is what the others waited for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline.communication.ring.wire import COLLECTIVE, RECEIVING
from paceline.core.world import World
from paceline.errors import MismatchError


@dataclass(frozen=True)
class FailedOperation:
    """The exchange that failed.

    Attributes:
        name: for people.
        slot: the label of its channel or part.
        number: operations of this role there, up to this one.
        role: COLLECTIVE, RECEIVING or SENDING.
        owner: the rank that found out.
        members: ranks that take part.
    """

    name: str
    slot: str
    number: int
    role: int
    owner: int
    members: tuple[int, ...]

    def place(self) -> str:
        """Under which name the others count the operation, in `at`."""
        if self.role == COLLECTIVE:
            return self.slot
        return f"{self.slot}{'>' if self.role == RECEIVING else '<'}{self.owner}"


@dataclass(frozen=True)
class BreakNotice:
    """What a worker says when it breaks off.

    Attributes:
        why: for people.
        lost: ranks that it knows to be lost.
        definite: nobody needs to be asked.
        at: operations begun, by slot, and by slot and partner for messages (">" to, "<" from).
        waits: slots at which a collective operation was under way.
        case: what failed, where an exchange did.
    """

    why: str
    lost: tuple[int, ...]
    definite: bool
    at: Mapping[str, int]
    waits: tuple[str, ...]
    case: FailedOperation | None

    def note(self) -> dict[str, Any]:
        """As JSON."""
        case = self.case
        said = None
        if case is not None:
            said = [case.name, case.slot, case.number, case.role, case.owner, list(case.members)]
        known = {"why": self.why, "lost": list(self.lost), "definite": self.definite}
        return {**known, "at": self.at, "waits": list(self.waits), "case": said}

    @classmethod
    def read(cls, note: Any, size: int) -> BreakNotice:
        """What another one says; MismatchError where that makes no sense."""
        try:
            keys = ("why", "lost", "definite", "at", "waits", "case")
            why, lost, definite, at, waits, said = (note[key] for key in keys)
            case = None
            if said is not None:
                name, slot, number, role, owner, members = said
                case = FailedOperation(
                    str(name)[:500], str(slot)[:500], int(number), int(role), int(owner), _ranks(members, size)
                )
            counts = {str(place): int(count) for place, count in at.items()}
            slots = tuple(str(slot)[:500] for slot in waits)
            return cls(str(why)[:2000], _ranks(lost, size), bool(definite), counts, slots, case)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MismatchError(f"it breaks off in words that nobody understands: {error!r}") from error


def _ranks(values: Any, size: int) -> tuple[int, ...]:
    ranks = tuple(int(value) for value in values)
    if len(ranks) > size or any(not 0 <= rank < size for rank in ranks):
        raise ValueError(f"ranks must be of 0 to {size - 1}, got {ranks[:10]}")
    return ranks


def missing_members(case: FailedOperation, me: int, words: Mapping[int, BreakNotice]) -> tuple[list[int], list[int]]:
    """Of the members of `case`, those who have said nothing, and those who say that they have not come to it.

    Who waits there for an exchange before it is not to blame, as long as there is anybody else: he waits for that one.
    """
    others = [rank for rank in case.members if rank != me]
    silent = [rank for rank in others if rank not in words]
    behind = [rank for rank in others if rank in words and words[rank].at.get(case.place(), 0) < case.number]
    if case.role != COLLECTIVE:  # a message: whoever found out is not behind in what only the other one counts
        behind = [rank for rank in behind if rank != case.owner]
        return silent, behind
    absent = [rank for rank in behind if case.slot not in words[rank].waits]
    return silent, absent if absent or silent else behind


def sentence(world: World, silent: Sequence[int], behind: Sequence[int], others: Sequence[int]) -> str:
    """Who did what not."""
    parts = []
    if others:
        parts.append(f"{world.names(list(others))} {'is' if len(others) == 1 else 'are'} lost")
    if silent:
        parts.append(f"{world.names(list(silent))} did not answer")
    if behind:
        parts.append(f"{world.names(list(behind))} did not come to it")
    return ", ".join(parts)


@dataclass
class Breakdown:
    """Why the connections broke.

    Attributes:
        why: for people.
        case: the exchange that failed; None where none has.
        definite: nobody needs to be asked who is missing.
        until: how long the words of other workers are awaited, by the monotonic clock.
        text: the error, once it is known who is to blame.
    """

    why: str
    case: FailedOperation | None
    definite: bool
    until: float
    text: str = ""


class Evidence(NamedTuple):
    """What a worker knows when the connections are broken.

    Attributes:
        world: this worker.
        timeout_s: deadline of an exchange.
        words: what other workers said, by rank.
        at: operations that this worker has begun, as in `Word`.
    """

    world: World
    timeout_s: float
    words: Mapping[int, BreakNotice]
    at: Mapping[str, int]


class FailureCause(NamedTuple):
    """Who is to blame.

    Attributes:
        text: the error; empty where more words are to be awaited first.
        blamed: ranks that are lost by this.
        wait_s: how long to wait for more words.
    """

    text: str
    blamed: AbstractSet[int] = frozenset()
    wait_s: float = 0.0


def find_cause(broken: Breakdown, evidence: Evidence, lost: AbstractSet[int]) -> FailureCause:
    """Find out who is missing, or say how long to wait for more words.

    Args:
        broken: why the connections broke.
        evidence: what this worker knows.
        lost: ranks that are known to be lost.
    """
    case, world = broken.case, evidence.world
    if case is None:
        return FailureCause(world.sign(broken.why))
    silent, behind = [], []  # type: tuple[list[int], list[int]]
    if not lost and not broken.definite:
        silent, behind = missing_members(case, world.rank, evidence.words)
        left = broken.until - time.monotonic()
        if silent and left > 0:
            return FailureCause("", wait_s=left)
    blamed = {*silent, *behind}
    if lost or blamed:
        who = (
            f"{sentence(world, silent, behind, sorted(lost))}. Look at the last lines of that worker; it died, hung, "
            "was cut off, or made fewer steps and left without run.close()"
        )
    elif world.rank in case.members and evidence.at.get(case.place(), 0) < case.number:
        who = "this worker did not come to it"
    else:
        who = "it was broken off" if broken.definite else "all came to it, and yet nothing moved"
    why = broken.why[:1].upper() + broken.why[1:]
    number, deadline = f"exchange {case.number} ({case.name}", f"deadline {evidence.timeout_s:g} s)"
    return FailureCause(world.sign(f"{number}, {deadline} failed: {who}. {why}"), blamed)
