# SPDX-License-Identifier: Apache-2.0
"""Who is to blame when an exchange fails.

A connection that ended names its worker. A deadline that passed names nobody: in a ring, each waits for its neighbour,
who waits as well. So all break off and say how far they had come. Who says nothing did not answer; who says that it has
not come to the exchange yet is what the others waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.communication.ring.wire import COLLECTIVE, RECEIVING
from paceline.core.world import World
from paceline.errors import MismatchError


@dataclass(frozen=True)
class Case:
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
class Word:
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
    case: Case | None

    def note(self) -> dict[str, Any]:
        """As JSON."""
        case = self.case
        said = None
        if case is not None:
            said = [case.name, case.slot, case.number, case.role, case.owner, list(case.members)]
        known = {"why": self.why, "lost": list(self.lost), "definite": self.definite}
        return {**known, "at": self.at, "waits": list(self.waits), "case": said}

    @classmethod
    def read(cls, note: Any, size: int) -> Word:
        """What another one says; MismatchError where that makes no sense."""
        try:
            keys = ("why", "lost", "definite", "at", "waits", "case")
            why, lost, definite, at, waits, said = (note[key] for key in keys)
            case = None
            if said is not None:
                name, slot, number, role, owner, members = said
                case = Case(str(name)[:500], str(slot)[:500], int(number), int(role), int(owner), _ranks(members, size))
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


def missing(case: Case, me: int, words: Mapping[int, Word]) -> tuple[list[int], list[int]]:
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
