# SPDX-License-Identifier: Apache-2.0
"""One worker's part in an examination.

1. Every worker puts its machine and port into the store at MASTER_ADDR. Rank 0 publishes which workers came in time.
2. Every worker connects to every other, all at once, first at gloo's address and then at the remaining addresses.
3. In round r, worker i measures the link to worker i + r, so that each sends to one and receives from one at a time.
4. Every worker puts its measurements into the store; rank 0 collects them and publishes whether the cluster is fit.

The store carries only a few kilobytes of JSON. Every step has a deadline; workers that miss it are named, and the
examination goes on without them.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import PacelineError, PeerLostError
from paceline_plugins.forecast.doctor.machine import examine
from paceline_plugins.forecast.doctor.measured import Machine, MeasuredLink, Measurements, from_json
from paceline_plugins.forecast.doctor.wire import Server, connect, measure_bandwidth, ping

c10d: Any = dist  # its stubs lack the stores

CONNECT_S = 3.0
PINGS = 30
POLL_S = 0.02
SLACK_S = 10.0  # added to the expected time of a measurement
MAX_CONNECTING = 64


@dataclass(frozen=True)
class ProbeCoordinates:
    """Rank, size and store of this worker, from the launcher's variables."""

    rank: int
    size: int
    address: str
    port: int
    agent_store: bool = False  # torchrun keeps the store itself


class RendezvousError(PacelineError, RuntimeError):
    """The store at MASTER_ADDR cannot be reached, or rank 0 has ended."""


def coordinates_from(environment: Mapping[str, str]) -> ProbeCoordinates | None:
    """The launcher's coordinates; None without a launcher. Raises ValueError for invalid variables."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    missing = [name for name in names if name not in environment]
    if missing:
        raise ValueError(f"the launcher's variables {', '.join(missing)} are not set")
    rank, size, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < size:
        raise ValueError(f"RANK must lie in 0..WORLD_SIZE-1, got RANK={rank} and WORLD_SIZE={size}")
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return ProbeCoordinates(rank, size, environment["MASTER_ADDR"], port, agent)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"{name} must be a number, got {environment[name]!r}") from None


class Probe:
    """One worker's part.

    Args:
        place: from `coordinates_from`.
        timeout_s: how long to wait for workers to join.
        seconds: of each transfer whose speed is measured.
    """

    def __init__(self, place: ProbeCoordinates, timeout_s: float, seconds: float) -> None:
        self.place, self.timeout_s, self.seconds = place, timeout_s, seconds
        self._store: Any = None
        self._peers: dict[int, socket.socket] = {}

    def run(self) -> Measurements | None:
        """Examine; returns all measurements on rank 0, None on other ranks."""
        self._store = _store(self.place, self.timeout_s)
        try:
            return self._run()
        except (dist.DistError, RuntimeError) as error:
            if isinstance(error, PacelineError):
                raise
            raise RendezvousError(
                f"rank {self.place.rank} on {socket.gethostname()} lost the store at "
                f"{self.place.address}:{self.place.port}: rank 0 has ended; see its output"
            ) from error
        finally:
            for peer in self._peers.values():
                peer.close()

    def _run(self) -> Measurements | None:
        token = self._token()
        server = Server(self.place.rank, token)
        try:
            machine = examine(self.place.rank)
            self._put("card", {"machine": asdict(machine), "port": server.port})
            cards = self._rendezvous()
            links = self._measure(cards, token)
            self._put("links", {"links": [asdict(link) for link in links]})
            return self._collect(cards) if self.place.rank == 0 else None
        finally:
            server.close()

    def conclude(self, fit: bool) -> None:
        """Publish the result (rank 0), and wait until the other ranks have read it."""
        self._store.set("fit", json.dumps(fit))
        present = json.loads(self._store.get("present"))
        self._await("heard", [rank for rank in present if rank], 2.0)

    def verdict(self) -> bool:
        """Rank 0's result; raises `PeerLostError` where it does not publish one."""
        if not self._await_key("fit", self.timeout_s + CONNECT_S + self.place.size * self._round_s()):
            raise PeerLostError(f"rank 0 did not say how the examination ended [rank {self.place.rank}]")
        fit = bool(json.loads(self._store.get("fit")))
        self._put("heard", {})
        return fit

    def _token(self) -> str:
        if self.place.rank == 0:
            self._store.set("token", secrets.token_hex(8))
        elif not self._await_key("token", self.timeout_s):
            raise RendezvousError(
                f"rank 0 did not come within {self.timeout_s:g} s: the store at {self.place.address}:"
                f"{self.place.port} answers, but rank 0 has not started [rank {self.place.rank}]"
            )
        return str(self._store.get("token").decode())

    def _put(self, kind: str, value: dict[str, Any]) -> None:
        self._store.set(f"{kind}/{self.place.rank}", json.dumps(value))

    def _await(self, kind: str, ranks: list[int], timeout_s: float) -> list[int]:
        """Wait for a key of each of `ranks`; returns the ranks that have put one in time."""
        until, here = time.monotonic() + timeout_s, set[int]()
        while len(here) < len(ranks):
            here |= {rank for rank in ranks if rank not in here and self._store.check([f"{kind}/{rank}"])}
            if time.monotonic() > until:
                break
            time.sleep(POLL_S)
        return sorted(here)

    def _await_key(self, key: str, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self._store.check([key]):
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def _rendezvous(self) -> dict[int, dict[str, Any]]:
        """The cards of the workers that came in time, as rank 0 decides."""
        if self.place.rank == 0:
            came = self._await("card", list(range(self.place.size)), self.timeout_s)
            self._store.set("present", json.dumps(came))
        elif not self._await_key("present", self.timeout_s + SLACK_S):
            raise PeerLostError(f"rank 0 came and then stopped answering [rank {self.place.rank}]")
        present = json.loads(self._store.get("present"))
        return {rank: json.loads(self._store.get(f"card/{rank}")) for rank in present}

    def _measure(self, cards: dict[int, dict[str, Any]], token: str) -> list[MeasuredLink]:
        others = [rank for rank in cards if rank != self.place.rank]
        if self.place.rank not in cards:
            raise RendezvousError(f"rank {self.place.rank} came too late: the examination has begun")
        with ThreadPoolExecutor(MAX_CONNECTING) as pool:
            links = dict(
                zip(others, pool.map(lambda rank: self._connect(rank, cards[rank], token), others), strict=True)
            )
        fast = bandwidth_pairs({rank: str(card["machine"]["host"]) for rank, card in cards.items()})
        ranks, me = sorted(cards), sorted(cards).index(self.place.rank)
        waited_for = list(others)
        for turn in range(1, len(ranks)):
            target = ranks[(me + turn) % len(ranks)]
            if target in self._peers:
                links[target] = self._measure_link(links[target], (self.place.rank, target) in fast)
            self._put(f"round{turn}", {})
            waited_for = self._await(f"round{turn}", waited_for, self._round_s())
        return list(links.values())

    def _round_s(self) -> float:
        return CONNECT_S + 2 * self.seconds + SLACK_S

    def _connect(self, rank: int, card: dict[str, Any], token: str) -> MeasuredLink:
        """Connect to a worker at gloo's address, or else at its other addresses."""
        machine = from_json(Machine, card["machine"])
        link, problems = MeasuredLink(self.place.rank, rank), []
        for address in _addresses(machine):
            try:
                self._peers[rank] = connect(address, int(card["port"]), rank, token, CONNECT_S)
            except OSError as error:
                problems.append(f"{address}: {_error_text(error)}")
                continue
            beside = problems[0] if problems and address != machine.gloo_address else ""
            return replace(link, address=address, gloo_problem=beside)
        return replace(link, problem=problems[0] if problems else "it has no address")

    def _measure_link(self, link: MeasuredLink, transfer: bool) -> MeasuredLink:
        """Measure round trips, clocks and, for some pairs, the bandwidth."""
        peer = self._peers[link.target]
        try:
            peer.settimeout(CONNECT_S + self.seconds)
            trips = [ping(peer) for _ in range(PINGS)]
            trip, clock = min(trips)
            link = replace(link, latency_s=trip, clock_s=clock)
            if transfer:
                peer.settimeout(self.seconds + SLACK_S)
                fastest = max(measure_bandwidth(peer, self.seconds / 2) for _ in range(2))  # the host may pause in one
                link = replace(link, bandwidth_bytes_s=fastest)
        except (OSError, KeyError, ValueError) as error:
            return replace(link, problem=f"{link.address}: the connection stopped ({_error_text(error)})")
        return link

    def _collect(self, cards: dict[int, dict[str, Any]]) -> Measurements:
        came = self._await("links", list(cards), self._round_s())
        found = [json.loads(self._store.get(f"links/{rank}"))["links"] for rank in came]
        links = [from_json(MeasuredLink, link) for links in found for link in links]
        return Measurements(
            size=self.place.size,
            machines={rank: from_json(Machine, card["machine"]) for rank, card in cards.items()},
            links=sorted(links, key=lambda link: (link.source, link.target)),
            lost=[rank for rank in cards if rank not in came],
            timeout_s=self.timeout_s,
        )


def bandwidth_pairs(hosts: Mapping[int, str]) -> set[tuple[int, int]]:
    """The ordered pairs whose bandwidth is measured.

    Workers of a host share its link, and would measure a part of it each. So across hosts only the first worker of each
    host measures, and within a host each worker with the first. On a single host all pairs measure.
    """
    first = {host: min(r for r, h in hosts.items() if h == host) for host in hosts.values()}
    alone = len(first) == 1
    return {
        (a, b)
        for a in hosts
        for b in hosts
        if a != b and (alone or {a, b} <= set(first.values()) or (hosts[a] == hosts[b] and first[hosts[a]] in (a, b)))
    }


def _addresses(machine: Machine) -> list[str]:
    """Addresses of a worker: gloo's, then every interface, loopback last."""
    others = sorted(machine.interfaces.values(), key=lambda address: address.startswith("127."))
    return list(dict.fromkeys([a for a in (machine.gloo_address, *others) if a]))


def _error_text(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def _store(place: ProbeCoordinates, timeout_s: float) -> Any:
    """Connect to the store at MASTER_ADDR; rank 0 opens it, unless torchrun has."""
    serves = place.rank == 0 and not place.agent_store
    if not serves:
        _await_master(place, timeout_s)
    try:
        store = c10d.TCPStore(
            place.address, place.port, None, serves, timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {place.rank} on {socket.gethostname()} cannot {'open' if serves else 'use'} the store at "
            f"{place.address}:{place.port}: {str(error).splitlines()[0][:200]}. Choose a free MASTER_PORT, and for "
            "MASTER_ADDR an address of the host where rank 0 runs"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return c10d.PrefixStore(f"paceline-doctor-{attempt}", store)


def _await_master(place: ProbeCoordinates, timeout_s: float) -> None:
    """Wait until the store can be reached; raises an error that says more than torch's."""
    until, problem = time.monotonic() + timeout_s, "no answer"
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=min(CONNECT_S, timeout_s)).close()
            return
        except OSError as error:
            problem = _error_text(error)
        if time.monotonic() > until:
            raise RendezvousError(
                f"rank {place.rank} on {socket.gethostname()} cannot reach MASTER_ADDR:MASTER_PORT {place.address}:"
                f"{place.port} within {timeout_s:g} s ({problem}). Is rank 0 started? Does a firewall of its host let "
                "that port in? Is the address one that this host can reach?"
            )
        time.sleep(0.1)
