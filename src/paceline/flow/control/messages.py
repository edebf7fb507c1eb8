# SPDX-License-Identifier: Apache-2.0
"""The messages of the control plane: addresses, generations, outcomes of exchanges, and the user's settings."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from paceline.errors import MismatchError
from paceline.flow.control import validation

_RELAYED = re.compile(r"[0-9A-Za-z]{1,64}@[0-9A-Za-z.:%]{1,64}")


@dataclass(frozen=True)
class WorkerAddress:
    """A worker's number and address."""

    worker: int  # its number in this run; never reused
    host: str  # its host name, for display
    address: str  # of its listener, to which other members connect
    port: int  # of its listener
    certificate: str = ""  # ID of the certificate with which it joined; empty without certificates
    relayed: str = ""  # its address at the relay, an opaque text NAME@SITE, where the run has one; else empty

    @property
    def site(self) -> str:
        """The router behind which it is; empty without a relay."""
        return self.relayed.partition("@")[2]

    def note(self) -> list[Any]:
        """For JSON."""
        place = [self.worker, self.host, self.address, self.port]
        if self.relayed:
            return [*place, self.certificate, self.relayed]
        return [*place, self.certificate] if self.certificate else place

    @classmethod
    def read(cls, note: Any) -> WorkerAddress:
        """What `note` gave; MismatchError for anything else."""
        fields = validation.rows(note, "the parts of a place")
        fields = [*fields, "", ""][:6] if len(fields) in (4, 5) else fields
        worker, host, address, port, certificate, relayed = validation.row(fields, 6, "a place")
        return cls(
            validation.whole(worker, 0, validation.WORKERS, "a worker's number"),
            validation.text(host, 255, "a host"),
            validation.address(address),
            validation.whole(port, 0, 65535, "a port"),
            validation.text(certificate, 64, "a certificate's ID"),
            _relayed(relayed),
        )


@dataclass(frozen=True)
class Generation:
    """The members between two changes of membership."""

    number: int = 0  # 1, 2, ..; 0 before there was any
    members: tuple[WorkerAddress, ...] = ()  # by rank, which is the order of their numbers
    exchange: int = 0  # number of committed exchanges; the next one is `exchange + 1`
    newcomers: frozenset[int] = frozenset()  # numbers of members that do not hold the state of `exchange`
    donor: int | None = None  # the member that sends it to them; None if no member holds it
    reason: str = ""  # why it was formed, for display
    wanted: int = 0  # members that the run wants as of `exchange`; 0: as many as there are

    @property
    def restored(self) -> bool:
        """Exchanges were committed, but no live worker holds the state: all begin from a checkpoint."""
        return self.exchange > 0 and self.donor is None

    @property
    def workers(self) -> list[int]:
        """The members' numbers, by rank."""
        return [place.worker for place in self.members]

    @property
    def label(self) -> str:
        """Its name for connections among its members.

        The number is not enough: a server whose record is old, since the disk was full, gives numbers a second time.
        """
        members = json.dumps([place.note() for place in self.members]).encode()
        return f"generation {self.number} of {zlib.crc32(members):08x}"

    def rank(self, worker: int) -> int | None:
        """The rank of `worker`; None if it is no member."""
        return self.workers.index(worker) if worker in self.workers else None

    def committed(self, number: int, exchange: int, donor: int, wanted: int) -> Generation:
        """This generation once `exchange` is committed: all members hold the state, and `donor` is the first of them.

        Raises:
            MismatchError: the exchange is of another generation.
        """
        if number != self.number:
            raise MismatchError(
                f"exchange {exchange} is of generation {number}, the newest known here is {self.number}"
            )
        return replace(self, exchange=exchange, newcomers=frozenset(), donor=donor, wanted=wanted)

    def note(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "number": self.number,
            "members": [place.note() for place in self.members],
            "exchange": self.exchange,
            "newcomers": sorted(self.newcomers),
            "donor": self.donor,
            "restored": self.restored,
            "reason": self.reason,
            **({"wanted": self.wanted} if self.wanted else {}),
        }

    @classmethod
    def read(cls, note: Any) -> Generation:
        """What `note` gave; MismatchError for anything else."""
        fields = validation.table(note, "a generation")
        donor = fields.get("donor")
        return cls(
            validation.whole(fields.get("number"), 0, validation.HUGE, "a generation"),
            tuple(WorkerAddress.read(one) for one in validation.rows(fields.get("members"), "the members")),
            validation.whole(fields.get("exchange"), 0, validation.HUGE, "an exchange"),
            frozenset(validation.workers(fields.get("newcomers"))),
            None if donor is None else validation.whole(donor, 0, validation.WORKERS, "a donor"),
            validation.text(fields.get("reason"), validation.REASON, "a reason"),
            validation.whole(fields.get("wanted", 0), 0, validation.WORKERS, "wanted workers"),
        )


class CommitOutcome(NamedTuple):
    """Whether an exchange is committed, and the generation from now on, in which it must be repeated if it is not."""

    committed: bool
    generation: Generation


@dataclass(frozen=True)
class Terms:
    """The user's settings."""

    min_workers: int = 1  # with fewer, the run waits
    max_workers: int = 1024  # more are refused
    timeout_s: float = 600.0  # seconds that an exchange waits for a straggler; other deadlines follow from it
    # seconds after `min_workers` have reached an exchange until the remaining members are called to it; None:
    # they are not called
    grace_s: float | None = None
    start_s: float = 0.0  # at the start, once `min_workers` have joined, seconds to wait for more
    expected: int = 0  # workers expected at the start, which begins once they have joined. 0: unknown
    quorum_s: float = 86400.0  # seconds that the run waits below `min_workers`

    def __post_init__(self) -> None:
        if not 1 <= self.min_workers <= self.max_workers:
            raise ValueError(
                f"the workers are 1 or more, as MIN:MAX with MIN <= MAX, got {self.min_workers}:{self.max_workers}"
            )
        for name in ("timeout_s", "quorum_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is a number of seconds above 0, got {getattr(self, name)}")
        for name in ("grace_s", "start_s", "expected"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0:
                raise ValueError(f"{name} is not negative, got {getattr(self, name)}")

    def bounded(self, wanted: int) -> int:
        """A wanted number of members within the user's bounds; 0 stays."""
        return wanted and min(max(wanted, self.min_workers), self.max_workers)

    @property
    def silence_s(self) -> float:
        """Seconds without a heartbeat after which a worker is lost."""
        return min(60.0, max(0.5, self.timeout_s / 10))

    @property
    def beat_s(self) -> float:
        """Seconds between heartbeats."""
        return min(2.0, self.silence_s / 5)

    @property
    def return_s(self) -> float:
        """Seconds that the members have to reconnect to a restarted server."""
        return self.timeout_s / 4


@dataclass(frozen=True)
class About:
    """A worker's description of itself."""

    host: str  # its host name, for display
    address: str  # of its listener
    port: int  # of its listener
    # what all workers must have in common (rule, shapes, seed), as JSON; compared key by key
    fingerprint: dict[str, Any] = field(default_factory=dict)
    first: int = 0  # members that the run wants at its start; 0: as many as there are. It follows from the rule
    relayed: str = ""  # its address at the relay, an opaque text NAME@SITE, where the run has one; else empty

    def note(self) -> dict[str, Any]:
        """For JSON."""
        about = {"host": self.host, "address": self.address, "port": self.port, "fingerprint": self.fingerprint}
        about |= {"door": self.relayed} if self.relayed else {}
        return {**about, "first": self.first} if self.first else about

    @classmethod
    def read(cls, note: Any) -> About:
        """What `note` gave; MismatchError for anything else."""
        fields = validation.table(note, "what a worker says about itself")
        place = WorkerAddress.read(
            [0, fields.get("host"), fields.get("address"), fields.get("port"), "", fields.get("door", "")]
        )
        fingerprint = validation.small(fields.get("fingerprint"), 1 << 16, "a fingerprint")
        first = validation.whole(fields.get("first", 0), 0, validation.WORKERS, "the first workers")
        return cls(place.host, place.address, place.port, fingerprint, first, place.relayed)


def _relayed(value: Any) -> str:
    if not isinstance(value, str) or (value and not _RELAYED.fullmatch(value)):
        raise MismatchError(f"an address at a relay is NAME@SITE, got {value!r:.80}")
    return value
