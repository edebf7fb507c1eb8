# SPDX-License-Identifier: Apache-2.0
"""What one worker does in an examination: come, call every other one, measure, tell rank 0.

1. Everybody leaves a card in the store at MASTER_ADDR: who and where. Rank 0 says who has come in time.
2. Everybody calls everybody, all at once, by gloo's address first and by the others after it.
3. In round r, worker i measures the way to worker i + r, so that each sends to one and hears from one at a time.
4. Everybody leaves what was found; rank 0 collects it, judges, and says whether the cluster is fit.

The store carries only a few kilobytes of JSON. No step waits longer than its deadline: who is not there by then is
named and done without.
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
from paceline.forecast.doctor.machine import examine
from paceline.forecast.doctor.measured import Machine, MeasuredLink, Measurements, link_from_json, machine_from_json
from paceline.forecast.doctor.wire import Server, call, give, ping

c10d: Any = dist  # whose stubs leave the stores out

CONNECT_S = 3.0
PINGS = 30
LOOK_EVERY_S = 0.02
SLACK_S = 10.0  # for a measurement to end, over the time it should take
CALLS_AT_ONCE = 64


@dataclass(frozen=True)
class ProbeCoordinates:
    """Where the workers meet and who this one is, from the launcher's variables."""

    rank: int
    size: int
    address: str
    port: int
    agent_store: bool = False  # torchrun keeps the store itself


class RendezvousError(PacelineError, RuntimeError):
    """The store at MASTER_ADDR cannot be reached, or rank 0 is gone; the message says what to look at."""


def coordinates_from(environment: Mapping[str, str]) -> ProbeCoordinates | None:
    """The place that a launcher names; None without one. Raises ValueError where the variables make no sense."""
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
        timeout_s: how long to wait for who has not come.
        seconds: of each transfer whose speed is measured.
    """

    def __init__(self, place: ProbeCoordinates, timeout_s: float, seconds: float) -> None:
        self.place, self.timeout_s, self.seconds = place, timeout_s, seconds
        self._store: Any = None
        self._peers: dict[int, socket.socket] = {}

    def run(self) -> Measurements | None:
        """Examine; rank 0 gets everything, the others None."""
        self._store = _store(self.place, self.timeout_s)
        try:
            return self._run()
        except (dist.DistError, RuntimeError) as error:
            if isinstance(error, PacelineError):
                raise
            raise RendezvousError(
                f"rank {self.place.rank} on {socket.gethostname()} lost the store at "
                f"{self.place.address}:{self.place.port}: rank 0 has ended; look at what it said"
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
            cards = self._meet()
            links = self._measure(cards, token)
            self._put("links", {"links": [asdict(link) for link in links]})
            return self._collect(cards) if self.place.rank == 0 else None
        finally:
            server.close()

    def conclude(self, fit: bool) -> None:
        """Rank 0 tells the others, and stays until they have heard it."""
        self._store.set("fit", json.dumps(fit))
        present = json.loads(self._store.get("present"))
        self._await("heard", [rank for rank in present if rank], 2.0)

    def verdict(self) -> bool:
        """What rank 0 concluded; raises `PeerLostError` where it does not say."""
        if not self._await_key("fit", self._patience_s() + self.timeout_s):
            raise PeerLostError(f"rank 0 did not say how the examination ended [rank {self.place.rank}]")
        fit = bool(json.loads(self._store.get("fit")))
        self._put("heard", {})
        return fit

    # -- the store -----------------------------------------------------------------------------------------------

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

    def _get(self, kind: str, rank: int) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._store.get(f"{kind}/{rank}"))
        return value

    def _await(self, kind: str, ranks: list[int], timeout_s: float) -> list[int]:
        """Those of `ranks` that have put something of a kind, after all have or the time is over."""
        until, here = time.monotonic() + timeout_s, set[int]()
        while len(here) < len(ranks):
            here |= {rank for rank in ranks if rank not in here and self._store.check([f"{kind}/{rank}"])}
            if time.monotonic() > until:
                break
            time.sleep(LOOK_EVERY_S)
        return sorted(here)

    def _await_key(self, key: str, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self._store.check([key]):
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    # -- the steps -----------------------------------------------------------------------------------------------

    def _meet(self) -> dict[int, dict[str, Any]]:
        """The cards of those who came in time, by rank 0's count."""
        if self.place.rank == 0:
            came = self._await("card", list(range(self.place.size)), self.timeout_s)
            self._store.set("present", json.dumps(came))
        elif not self._await_key("present", self.timeout_s + SLACK_S):
            raise PeerLostError(f"rank 0 came and then stopped answering [rank {self.place.rank}]")
        present = json.loads(self._store.get("present"))
        return {rank: self._get("card", rank) for rank in present}

    def _measure(self, cards: dict[int, dict[str, Any]], token: str) -> list[MeasuredLink]:
        others = [rank for rank in cards if rank != self.place.rank]
        if self.place.rank not in cards:
            raise RendezvousError(f"rank {self.place.rank} came too late: the examination had begun")
        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
            links = dict(zip(others, pool.map(lambda rank: self._call(rank, cards[rank], token), others), strict=True))
        fast = bandwidth_pairs(_hosts(cards))
        ranks, me = sorted(cards), sorted(cards).index(self.place.rank)
        waited_for = list(others)
        for turn in range(1, len(ranks)):
            target = ranks[(me + turn) % len(ranks)]
            if target in self._peers:
                links[target] = self._talk(links[target], (self.place.rank, target) in fast)
            self._put(f"round{turn}", {})
            waited_for = self._await(f"round{turn}", waited_for, self._round_s())
        return list(links.values())

    def _round_s(self) -> float:
        return CONNECT_S + 2 * self.seconds + SLACK_S

    def _patience_s(self) -> float:
        """The longest that an examination may take after all have come."""
        return CONNECT_S + self.place.size * self._round_s()

    def _call(self, rank: int, card: dict[str, Any], token: str) -> MeasuredLink:
        """Try gloo's address of a worker, then the others; keep the connection."""
        machine = machine_from_json(card["machine"])
        link, problems = MeasuredLink(self.place.rank, rank), []
        for address in _addresses(machine):
            try:
                self._peers[rank] = call(address, int(card["port"]), rank, token, CONNECT_S)
            except OSError as error:
                problems.append(f"{address}: {_said(error)}")
                continue
            beside = problems[0] if problems and address != machine.gloo_address else ""
            return replace(link, address=address, gloo_problem=beside)
        return replace(link, problem=problems[0] if problems else "it has no address")

    def _talk(self, link: MeasuredLink, transfer: bool) -> MeasuredLink:
        """Round trips, clocks and, for some pairs, the speed."""
        peer = self._peers[link.target]
        try:
            peer.settimeout(CONNECT_S + self.seconds)
            trips = [ping(peer) for _ in range(PINGS)]
            trip, clock = min(trips)
            link = replace(link, latency_s=trip, clock_s=clock)
            if transfer:
                peer.settimeout(self.seconds + SLACK_S)
                fastest = max(give(peer, self.seconds / 2) for _ in range(2))  # one may have met a pause of the host
                link = replace(link, bandwidth_bytes_s=fastest)
        except (OSError, KeyError, ValueError) as error:
            return replace(link, problem=f"{link.address}: the connection stopped ({_said(error)})")
        return link

    def _collect(self, cards: dict[int, dict[str, Any]]) -> Measurements:
        came = self._await("links", list(cards), self._round_s())
        links = [link_from_json(link) for rank in came for link in self._get("links", rank)["links"]]
        return Measurements(
            size=self.place.size,
            machines={rank: machine_from_json(card["machine"]) for rank, card in cards.items()},
            links=sorted(links, key=lambda link: (link.source, link.target)),
            lost=[rank for rank in cards if rank not in came],
            timeout_s=self.timeout_s,
        )


def bandwidth_pairs(hosts: Mapping[int, str]) -> set[tuple[int, int]]:
    """The ordered pairs whose speed is measured: all where each host has one worker, or where there is one host.

    Several workers of a host share its cable, and measuring them all at once would show each a part of it; so of each
    host the first one speaks to the first of the others, and within a host each to the first.
    """
    first = {host: min(r for r, h in hosts.items() if h == host) for host in hosts.values()}
    alone = len(first) == 1
    return {
        (a, b)
        for a in hosts
        for b in hosts
        if a != b and (alone or {a, b} <= set(first.values()) or (hosts[a] == hosts[b] and first[hosts[a]] in (a, b)))
    }


def _hosts(cards: dict[int, dict[str, Any]]) -> dict[int, str]:
    return {rank: str(card["machine"]["host"]) for rank, card in cards.items()}


def _addresses(machine: Machine) -> list[str]:
    """Where to try a worker: gloo's choice, then every interface, the loopback last."""
    others = sorted(machine.interfaces.values(), key=lambda address: address.startswith("127."))
    return list(dict.fromkeys([a for a in (machine.gloo_address, *others) if a]))


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def _store(place: ProbeCoordinates, timeout_s: float) -> Any:
    """The store at MASTER_ADDR; rank 0 opens it, unless torchrun has."""
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
    """Wait until the store can be reached, and say why it cannot: torch would say less, later."""
    until, problem = time.monotonic() + timeout_s, "no answer"
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=min(CONNECT_S, timeout_s)).close()
            return
        except OSError as error:
            problem = _said(error)
        if time.monotonic() > until:
            raise RendezvousError(
                f"rank {place.rank} on {socket.gethostname()} cannot reach MASTER_ADDR:MASTER_PORT {place.address}:"
                f"{place.port} within {timeout_s:g} s ({problem}). Is rank 0 started? Does a firewall of its host let "
                "that port in? Is the address one that this host can reach?"
            )
        time.sleep(0.1)
