# SPDX-License-Identifier: Apache-2.0
"""The messages of the control plane: addresses, generations, outcomes of exchanges, and the user's settings."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import MismatchError
from paceline.flow.control import validation

_RELAYED = re.compile(r"[0-9A-Za-z]{1,64}@[0-9A-Za-z.:%]{1,64}")


@dataclass(frozen=True)
class WorkerAddress:
    """A worker's number and address.

    Attributes:
        worker: its number in this run; never reused.
        host: its host name, for display.
        address: of its listener, to which other members connect.
        port: of its listener.
        certificate: ID of the certificate with which it joined; empty without certificates.
        relayed: its address at the relay, an opaque text NAME@SITE, where the run has one; else empty.
    """

    worker: int
    host: str
    address: str
    port: int
    certificate: str = ""
    relayed: str = ""

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
        said = validation.rows(note, "the parts of a place")
        said = [*said, "", ""][:6] if len(said) in (4, 5) else said
        worker, host, address, port, certificate, relayed = validation.row(said, 6, "a place")
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
    """The members between two changes of membership.

    Attributes:
        number: 1, 2, ..; 0 before there was any.
        members: by rank, which is the order of their numbers.
        exchange: number of committed exchanges; the next one is `exchange + 1`.
        newcomers: numbers of members that do not hold the state of `exchange`.
        donor: the member that sends it to them; None if no member holds it.
        reason: why it was formed, for display.
        wanted: members that the run wants as of `exchange`; 0: as many as there are.
    """

    number: int = 0
    members: tuple[WorkerAddress, ...] = ()
    exchange: int = 0
    newcomers: frozenset[int] = frozenset()
    donor: int | None = None
    reason: str = ""
    wanted: int = 0

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
        said = validation.table(note, "a generation")
        donor = said.get("donor")
        return cls(
            validation.whole(said.get("number"), 0, validation.HUGE, "a generation"),
            tuple(WorkerAddress.read(one) for one in validation.rows(said.get("members"), "the members")),
            validation.whole(said.get("exchange"), 0, validation.HUGE, "an exchange"),
            frozenset(validation.workers(said.get("newcomers"))),
            None if donor is None else validation.whole(donor, 0, validation.WORKERS, "a donor"),
            validation.text(said.get("reason"), validation.REASON, "a reason"),
            validation.whole(said.get("wanted", 0), 0, validation.WORKERS, "wanted workers"),
        )


@dataclass(frozen=True)
class CommitOutcome:
    """The outcome of an exchange.

    Attributes:
        committed: whether it is committed; if not, it must be repeated in `generation`.
        generation: the generation from now on.
    """

    committed: bool
    generation: Generation


@dataclass(frozen=True)
class Terms:
    """The user's settings.

    Attributes:
        min_workers: with fewer, the run waits.
        max_workers: more are refused.
        timeout_s: seconds that an exchange waits for a straggler; other deadlines follow from it.
        grace_s: seconds after `min_workers` have reached an exchange until the remaining members are called to it;
            None: they are not called.
        start_s: at the start, once `min_workers` have joined, seconds to wait for more.
        expected: workers expected at the start, which begins once they have joined. 0: unknown.
        quorum_s: seconds that the run waits below `min_workers`.
    """

    min_workers: int = 1
    max_workers: int = 1024
    timeout_s: float = 600.0
    grace_s: float | None = None
    start_s: float = 0.0
    expected: int = 0
    quorum_s: float = 86400.0

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
    """A worker's description of itself.

    Attributes:
        host: its host name, for display.
        address: of its listener.
        port: of its listener.
        fingerprint: what all workers must have in common (rule, shapes, seed), as JSON; compared key by key.
        first: members that the run wants at its start; 0: as many as there are. It follows from the rule.
        relayed: its address at the relay, an opaque text NAME@SITE, where the run has one; else empty.
    """

    host: str
    address: str
    port: int
    fingerprint: dict[str, Any] = field(default_factory=dict)
    first: int = 0
    relayed: str = ""

    def note(self) -> dict[str, Any]:
        """For JSON."""
        about = {"host": self.host, "address": self.address, "port": self.port, "fingerprint": self.fingerprint}
        about |= {"door": self.relayed} if self.relayed else {}
        return {**about, "first": self.first} if self.first else about

    @classmethod
    def read(cls, note: Any) -> About:
        """What `note` gave; MismatchError for anything else."""
        said = validation.table(note, "what a worker says about itself")
        place = WorkerAddress.read(
            [0, said.get("host"), said.get("address"), said.get("port"), "", said.get("door", "")]
        )
        fingerprint = validation.small(said.get("fingerprint"), 1 << 16, "a fingerprint")
        first = validation.whole(said.get("first", 0), 0, validation.WORKERS, "the first workers")
        return cls(place.host, place.address, place.port, fingerprint, first, place.relayed)


def _relayed(value: Any) -> str:
    if not isinstance(value, str) or (value and not _RELAYED.fullmatch(value)):
        raise MismatchError(f"an address at a relay is NAME@SITE, got {value!r:.80}")
    return value
