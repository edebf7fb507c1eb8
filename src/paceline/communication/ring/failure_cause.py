# SPDX-License-Identifier: Apache-2.0
"""Finds which workers made an exchange fail.

A connection that ended names its worker. A missed deadline names none: in a ring each worker waits for its neighbour,
which waits as well. So every worker breaks off and tells the others which operations it has begun (a `BreakNotice`). A
worker that sends no notice did not answer; a worker that has not begun the exchange kept the others waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from paceline.communication.ring.wire import COLLECTIVE, RECEIVING
from paceline.core import runtime
from paceline.core.world import World
from paceline.errors import MismatchError


@dataclass(frozen=True)
class FailedOperation:
    """The exchange that failed.

    Attributes:
        name: for messages.
        sequence: the label of its channel or subgroup.
        number: operations of this role there, up to this one.
        role: COLLECTIVE, RECEIVING or SENDING.
        owner: the rank that noticed the failure.
        members: ranks that take part.
    """

    name: str
    sequence: str
    number: int
    role: int
    owner: int
    members: tuple[int, ...]

    def place(self) -> str:
        """The key in `BreakNotice.at` under which the other members count the operation."""
        if self.role == COLLECTIVE:
            return self.sequence
        return f"{self.sequence}{'>' if self.role == RECEIVING else '<'}{self.owner}"


@dataclass(frozen=True)
class BreakNotice:
    """What a worker sends to the others when it breaks off.

    Attributes:
        why: for messages.
        lost: ranks that it knows to be lost.
        definite: the cause is known; no notices are awaited.
        at: operations begun, by sequence; for messages by sequence and peer (">" to, "<" from).
        waits: sequences on which a collective was in flight.
        case: the failed exchange, if any.
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
        fields = None
        if case is not None:
            fields = [case.name, case.sequence, case.number, case.role, case.owner, list(case.members)]
        known = {"why": self.why, "lost": list(self.lost), "definite": self.definite}
        return {**known, "at": self.at, "waits": list(self.waits), "case": fields}

    @classmethod
    def read(cls, note: Any, size: int) -> BreakNotice:
        """The inverse of `note`, for `size` workers; MismatchError if it is malformed."""
        try:
            keys = ("why", "lost", "definite", "at", "waits", "case")
            why, lost, definite, at, waits, fields = (note[key] for key in keys)
            case = None
            if fields is not None:
                name, sequence, number, role, owner, members = fields
                case = FailedOperation(
                    str(name)[:500], str(sequence)[:500], int(number), int(role), int(owner), _ranks(members, size)
                )
            counts = {str(place): int(count) for place, count in at.items()}
            sequences = tuple(str(sequence)[:500] for sequence in waits)
            return cls(str(why)[:2000], _ranks(lost, size), bool(definite), counts, sequences, case)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MismatchError(f"it breaks off with a malformed notice: {error!r}") from error


def _ranks(values: Any, size: int) -> tuple[int, ...]:
    ranks = tuple(int(value) for value in values)
    if len(ranks) > size or any(not 0 <= rank < size for rank in ranks):
        raise ValueError(f"ranks must be of 0 to {size - 1}, got {ranks[:10]}")
    return ranks


def missing_members(case: FailedOperation, me: int, notices: Mapping[int, BreakNotice]) -> tuple[list[int], list[int]]:
    """The members of `case` that have sent no notice, and those whose notice says that they have not begun it.

    A member that waits at an earlier exchange of the sequence is blamed only if there is no other: it waits for them.
    """
    others = [rank for rank in case.members if rank != me]
    silent = [rank for rank in others if rank not in notices]
    behind = [rank for rank in others if rank in notices and notices[rank].at.get(case.place(), 0) < case.number]
    if case.role != COLLECTIVE:  # of a message only the owner's peer counts under this place
        return silent, [rank for rank in behind if rank != case.owner]
    absent = [rank for rank in behind if case.sequence not in notices[rank].waits]
    return silent, absent if absent or silent else behind


def _sentence(world: World, silent: Sequence[int], behind: Sequence[int], lost: Sequence[int]) -> str:
    parts = []
    if lost:
        parts.append(f"{world.names(list(lost))} {'is' if len(lost) == 1 else 'are'} lost")
    if silent:
        parts.append(f"{world.names(list(silent))} did not answer")
    if behind:
        parts.append(f"{world.names(list(behind))} did not come to it")
    return ", ".join(parts)


@dataclass
class Breakdown:
    """Why the connections broke.

    Attributes:
        why: for messages.
        case: the exchange that failed, if any.
        definite: the cause is known; no notices are awaited.
        until: deadline for the notices of other workers, on the monotonic clock.
        text: the error, once the cause is known.
    """

    why: str
    case: FailedOperation | None
    definite: bool
    until: float
    text: str = ""


def find_cause(
    broken: Breakdown,
    world: World,
    timeout_s: float,
    notices: Mapping[int, BreakNotice],
    begun: Mapping[str, int],
    lost: AbstractSet[int],
) -> tuple[str, AbstractSet[int], float]:
    """Find the workers at fault, or how long to wait for more notices.

    Args:
        broken: what broke the connections.
        world: this worker.
        timeout_s: deadline of an exchange.
        notices: of other workers, by rank.
        begun: operations that this worker has begun, as `BreakNotice.at` has them.
        lost: ranks known to be lost.

    Returns:
        The error, empty while notices are awaited; ranks that are lost by it; seconds to wait for more notices.
    """
    case = broken.case
    if case is None:
        return world.sign(broken.why), frozenset(), 0.0
    silent, behind = [], []  # type: tuple[list[int], list[int]]
    if not lost and not broken.definite:
        silent, behind = missing_members(case, world.rank, notices)
        left = broken.until - runtime.monotonic()
        if silent and left > 0:
            return "", frozenset(), left
    blamed = {*silent, *behind}
    if lost or blamed:
        who = (
            f"{_sentence(world, silent, behind, sorted(lost))}. Look at the last lines of that worker; it died, hung, "
            "was cut off, or made fewer steps and left without run.close()"
        )
    elif world.rank in case.members and begun.get(case.place(), 0) < case.number:
        who = "this worker did not come to it"
    else:
        who = "it was broken off" if broken.definite else "all came to it, and yet nothing moved"
    why = broken.why[:1].upper() + broken.why[1:]
    number, deadline = f"exchange {case.number} ({case.name}", f"deadline {timeout_s:g} s)"
    return world.sign(f"{number}, {deadline} failed: {who}. {why}"), blamed, 0.0
