# SPDX-License-Identifier: Apache-2.0
"""The members of an elastic run, what they must share, and the connection among them, rebuilt when a worker leaves or
joins."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from paceline.communication.base import SoloTransport, Transport
from paceline.communication.ring import RingListener, RingTransport
from paceline.communication.ring.wire import Address
from paceline.communication.torch.store import own_address
from paceline.core import runtime
from paceline.core.flat import Modules, exchanged_parts
from paceline.core.optimizer_state import Owned
from paceline.core.world import World, host_name
from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import GivenUpError, PeerLostError, UnsupportedError
from paceline.extensions import DIALERS, extension
from paceline.flow.control.client import ControlClient
from paceline.flow.control.messages import About, Generation
from paceline.rules.rule import Rule
from paceline.update.engine import agreement
from paceline.update.engine.agreement import frozen, layout, untrained
from paceline.update.engine.settings import Settings


def _of_inner(name: str) -> Any:
    """A method that calls the same method of the transport inside."""
    return lambda self, *args, **kwargs: getattr(self.inner, name)(*args, **kwargs)


class MembersTransport(Transport):
    """The connection among the present members; the transport inside is replaced when they change.

    An operation that was begun among earlier members ends with `PeerLostError`.
    """

    name = "channel"

    def __init__(self) -> None:
        super().__init__(World())
        self.inner: Transport = SoloTransport(self.world)

    def renew(self, inner: Transport) -> None:
        """Switch to the connection among new members."""
        self.inner.close()
        self.inner, self.world = inner, inner.world
        inner.count_for(self)

    @property
    def background(self) -> bool:
        return self.inner.background

    wire_device = _of_inner("wire_device")
    all_reduce = _of_inner("all_reduce")
    reduce_scatter = _of_inner("reduce_scatter")
    all_to_all = _of_inner("all_to_all")
    all_gather = _of_inner("all_gather")
    broadcast = _of_inner("broadcast")
    send = _of_inner("send")
    receive = _of_inner("receive")
    open_channels = _of_inner("open_channels")
    channel = _of_inner("channel")
    part = _of_inner("part")
    close = _of_inner("close")


class CommitReport(NamedTuple):
    """What a member reports about an exchange that it has completed: the places whose work enters the global model,
    those whose work was rejected, facts for the status, and the members that the run wants from then on (0: as many as
    there are)."""

    marks: list[Mark]
    returned: list[Mark]
    facts: dict[str, Any]
    wanted: int = 0


class ElasticMembership:
    """This worker's membership."""

    def __init__(self, control: ControlClient, listener: RingListener, settings: Settings) -> None:
        self.control, self._listener, self._settings = control, listener, settings
        self.transport = MembersTransport()  # the connection among the members
        self.generation = Generation()  # the generation of members that this worker uses
        # the generation after the last applied exchange; None once it is adopted
        self.follows: Generation | None = None
        self.applied = 0  # the exchange whose state this worker's model has
        self._proof = settings.exchanged
        # lock, held while a committed exchange is applied, and while another thread reads the state
        self.applying = runtime.Lock()
        self.on_connect: list[Callable[[], None]] = []  # called in order when this worker is connected to new members
        self.on_close: list[Callable[[], None]] = []  # called when this worker has left the run
        control.on_change(self._break_off)
        control.on_hold(self._show_wait)
        control.on_end(lambda why: self.transport.inner.cancel(why))

    def enter(self) -> None:
        """Wait until this worker is a member, and connect to the other members."""
        generation = self.control.enter()
        self._show_wait("")
        self.renew(generation)

    def _show_wait(self, why: str) -> None:
        """Tell the launcher whether this worker waits to be needed: it may die so without being a failure."""
        if self._proof is not None:
            with contextlib.suppress(OSError):
                Path(self._proof).touch() if why else Path(self._proof).unlink(missing_ok=True)

    @property
    def rank(self) -> int:
        """This worker's rank among the members."""
        return self.rank_of(self.control.worker)

    def rank_of(self, worker: int) -> int:
        """The rank of a member."""
        return self.generation.workers.index(worker)

    @property
    def new(self) -> bool:
        """Whether this worker still needs the state."""
        return self.control.worker in self.generation.newcomers

    @property
    def exchange(self) -> int:
        """The number of the next exchange."""
        return self.generation.exchange + 1

    @property
    def outdated(self) -> bool:
        """Whether the control plane has announced a newer generation."""
        return self.control.generation.number > self.generation.number

    @property
    def called(self) -> bool:
        """Whether other members wait for this worker at the next exchange."""
        return self.control.called >= self.exchange

    @property
    def exact(self) -> bool:
        """Whether the control plane's ledger is that of the state that this worker's model has."""
        return self.control.ledger()[0] == self.applied

    def follow_control(self) -> None:
        """Between exchanges: adopt the members that the control plane announced."""
        if self.outdated:
            self.renew(self.control.generation)

    def _break_off(self, generation: Generation) -> None:
        """In the client's thread: cancel operations, which would wait for lost members."""
        inner = self.transport.inner
        if generation.number > self.generation.number:
            inner.cancel(f"the members have changed: {generation.reason}")

    def renew(self, generation: Generation) -> None:
        """Connect to the members of a generation, or of the next one if that fails."""
        while True:
            try:
                self._connect(generation)
                return
            except PeerLostError as error:
                generation = self.failed(error)

    def take_over(self) -> None:
        """After an exchange was applied: adopt the generation that follows."""
        follows, self.follows = self.follows, None
        if follows is not None and follows.number == self.generation.number:
            self.generation = follows
        elif follows is not None:
            self.renew(follows)

    def _connect(self, generation: Generation) -> None:
        places = generation.members
        if self.control.worker not in generation.workers:
            raise GivenUpError(f"worker {self.control.worker} is no member any more: {generation.reason}")
        self.generation = generation
        world = _world(generation, self.rank)
        settings, label = self._settings, generation.label
        addresses = [Address(place.address, place.port, place.certificate, place.relayed) for place in places]
        inner: Transport = SoloTransport(world)
        if world.size > 1:
            inner = RingTransport(self._listener, label, world, addresses, settings.timeout_s, settings.tls)
        self.transport.renew(inner)
        self.control.check()  # it may have ended before the new connection was there to cancel
        if self.outdated:  # the members changed while it connected, and nothing has cancelled it
            self._break_off(self.control.generation)
        for call in self.on_connect:
            call()

    def failed(self, error: PeerLostError) -> Generation:
        """Report a failed exchange; the generation for the next attempt, unless the run has given this worker up."""
        if isinstance(error, GivenUpError):
            raise error
        inner = self.transport.inner
        suspects = [self.generation.workers[rank] for rank in inner.lost]
        return self.control.failed(self.generation.number, str(error), suspects)

    def commit(self, report: CommitReport) -> Generation | None:
        """This worker has the complete next exchange, and reports it; wait until all members have.

        Returns:
            The generation that follows, if the exchange is committed; None if it must be repeated, among the members
            to which this worker is connected by then.
        """
        outcome = self.control.commit(
            self.generation.number, self.exchange, report.marks, report.facts, report.returned, report.wanted
        )
        if outcome.committed:
            self._leave_proof()
            return outcome.generation
        self.renew(outcome.generation)
        return None

    def _leave_proof(self) -> None:
        """Create the file by which the launcher learns that an exchange of this worker was committed."""
        proof, self._proof = self._proof, None
        if proof is not None:
            with contextlib.suppress(OSError):  # on a full disk, its death counts as one without progress
                Path(proof).touch()

    def close(self) -> None:
        """Leave the run, and release all resources."""
        self.control.close()
        self.transport.close()
        self._listener.close()
        while self.on_close:
            self.on_close.pop()()


def _world(generation: Generation, rank: int) -> World:
    hosts = tuple(place.host for place in generation.members)
    mates = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    return World(rank, len(hosts), mates.index(rank), len(mates), hosts[rank], hosts)


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _listener(control_host: str, relay: tuple[str, int] | None, settings: Settings) -> RingListener:
    if relay is None:
        return RingListener(own_address(control_host), settings.tls)
    if settings.tls is None:
        raise UnsupportedError("a relay needs certificates, and this worker has none: PACELINE_TLS names no folder")
    join_relay, tls = extension(DIALERS, "relay"), settings.tls
    dialers = lambda adopt: join_relay(relay, tls, adopt, settings.timeout_s)  # noqa: E731
    return RingListener(own_address(relay[0]), tls, dialers=dialers)


def join(fingerprint: dict[str, Any], settings: Settings, first: int = 0) -> ElasticMembership:
    """Ask the control plane to become a worker of its run.

    Args:
        fingerprint: the settings that all workers must share; serializable as JSON.
        settings: of the run, with `control`.
        first: members that the run wants at its start; 0: as many as there are.
    """
    assert settings.control is not None
    address, port = _host_and_port(settings.control)
    relay = None if settings.relay is None else _host_and_port(settings.relay)
    listener = _listener(address, relay, settings)
    try:
        dialer = listener.dialer
        relayed = "" if dialer is None else dialer.address
        dial = None if dialer is None or relay != (address, port) else dialer.dial_control
        about = About(host_name(), listener.address, listener.port, fingerprint, first, relayed)
        control = ControlClient(address, port, about, settings.tls, settings.timeout_s, dial)
    except BaseException:
        listener.close()
        raise
    return ElasticMembership(control, listener, settings)


def check_rule(rule: Rule) -> None:
    """Refuse rules whose workers cannot join and leave."""
    schedule = rule.schedule
    wrong = ""
    if not schedule.can_be_elastic:
        wrong = "exchanges no blocks; asynchronous rules survive losses by themselves, others are started again"
    elif schedule.overlap or schedule.warmup or rule.settings.within:
        wrong = "has overlap, a warm-up or one worker for each host, which are not served where workers come and go"
    if wrong:
        raise UnsupportedError(f"an elastic run needs a block rule such as bmuf(period=16), and {rule.text()} {wrong}")


def fingerprint(rule: Rule, model: Modules, owned: Owned, settings: Settings) -> dict[str, Any]:
    """The settings that all workers must share; serializable as JSON."""
    rows = [row for part in exchanged_parts(model, owned) for row in part.layout()] + layout(untrained(model, owned))
    rows += [[name] for name in frozen(model, owned)]
    about = agreement.about_optimizers(owned)
    del about["optimizer state at attach"]  # a joining worker receives it
    about["guard"] = str(settings.guard)
    shared = {"rule": rule.text(), "seed": settings.seed, "outer_state": settings.outer_state, **about}
    numbers = sum(p.numel() for _, named in owned for _, p in named)
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
    return {**shared, "tensors": len(rows), "numbers": numbers, "model": digest}
