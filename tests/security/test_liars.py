# SPDX-License-Identifier: Apache-2.0
"""A member with a valid certificate that lies: it is named and put out, and the others' samples count once.

The attacker is a client of the control plane as all others, over TLS: it joins, becomes a member, leases samples, and
then says what is not so. Two honest members train all samples meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devtools.storm.liar import LIES, Liar
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.communication.ring.failure_cause import BreakNotice
from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.channel import TLS
from paceline.communication.sockets.frames import HEADER_BYTES, Frame, FrameHeader, read_note
from paceline.communication.sockets.identity import CONTROL, WORKER, Identity
from paceline.data.ledger.epoch_ledger import Question
from paceline.errors import GivenUpError, MismatchError, PacelineError
from paceline.flow.control import wire
from paceline.flow.control.client import ControlClient
from paceline.flow.control.messages import About, Generation, Terms, WorkerAddress
from paceline.flow.control.server import dispatch
from paceline.flow.control.state_machine import StateMachine
from tests.flow.control.cluster import HERE, SOON, control, member, together, work

PLACES = 12
HARMLESS = {"done with what others hold", "leaves what others hold"}
"""Lies that change nothing, and may be an honest worker's words after a restart."""
CONTRADICTS = {"an epoch that ends early", "asks for other data"}
"""Lies that are answered, since an honest worker with other data says the same; whoever goes on is put out."""


class Attacker(Liar):
    """One that is connected to a real control plane."""

    def __init__(self, port: int, tls: TLS) -> None:
        self.client = ControlClient(HERE, port, About("host", HERE, 1, {"rule": "block"}), tls, SOON)
        self.job: Any = SimpleNamespace(samples=PLACES, epochs=1)
        self.held = []
        self.generation = Generation()

    @property
    def channel(self) -> Any:
        return self.client._connection._channel

    def raw(self, data: bytes) -> None:
        """Send bytes inside of TLS."""
        self.channel._write([memoryview(data)], 0, time.monotonic() + SOON, None)

    def beat(self, kind: int, steps: int, doing: object) -> None:
        """Send a heartbeat over the connection for them."""
        heartbeats = self.client._heartbeats._channel
        assert heartbeats is not None
        heartbeats.send(kind, (steps,), note=doing)


def header(note_bytes: int = 0, body_bytes: int = 0) -> bytes:
    return FrameHeader(wire.COMMIT, (1,) * 8, note_bytes, body_bytes, torch.float32 if body_bytes else None).pack()


RAW: dict[str, Callable[[Any], None]] = {
    "a body": lambda one: one.channel.send(wire.COMMIT, (9, 1, 1), body=torch.zeros(4)),
    "a body of a terabyte": lambda one: one.raw(header(body_bytes=1 << 40)),
    "a note of a gigabyte": lambda one: one.raw(header(note_bytes=1 << 30)),
    "no frame": lambda one: one.raw(b"x" * HEADER_BYTES),
    "a note that is no JSON": lambda one: one.raw(header(note_bytes=3) + b"{x}"),
    "a heartbeat of negative steps": lambda one: one.beat(wire.BEAT, -5, "trains"),
    "a heartbeat that is none": lambda one: one.beat(wire.COMMIT, 5, "trains"),
    "a heartbeat that says a list": lambda one: one.beat(wire.BEAT, 5, ["trains"]),
}
ATTACKS = {**LIES, **RAW}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[TLS]:
    """Of the control plane, and of three workers."""
    job, folder = Authority.new(), Path(tmp_path_factory.mktemp("job"))
    roles = [CONTROL, WORKER, WORKER, WORKER]
    return [job.issue(folder / f"{k}", f"holder {k}", role) for k, role in enumerate(roles)]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_member_that_lies_is_put_out(files: list[TLS], attack: str) -> None:
    with control(Terms(max_workers=8, expected=3, start_s=SOON), None, files[0]) as (server, log):
        liar = Attacker(server.port, files[1])
        honest = [member(server.port, tls) for tls in files[2:]]
        why: list[str] = []

        def lie() -> None:
            client = liar.client
            liar.generation = client.enter()
            client.holds_state(liar.generation.number)
            _, mark = client.ask(Question(0, 0, PLACES, 1, 2))
            assert mark is not None
            liar.held.append(mark)
            for _ in range(4 if attack in CONTRADICTS else 1):
                ATTACKS[attack](liar)
            if attack in HARMLESS:
                client.ledger()  # its answer follows all that was said
                assert server.status()["lost"] == 0
            else:
                with pytest.raises(GivenUpError, match=rf"worker {client.worker}.* was given up: ") as error:
                    client._wait(lambda: False, "to be put out", SOON)
                why.append(str(error.value))
            client.close()

        *marks, _ = together(*(lambda one=one: work(one, PLACES) for one in honest), lie)
        trained = sorted(place for its in marks for _, _, begin, end in its for place in range(begin, end))
        own = {place for _, _, begin, end in liar.held for place in range(begin, end)}
        if attack == "done with what others hold":  # what is leased to a member, it can say that it has done
            trained = sorted({*trained, *own})
        assert trained == list(range(PLACES))
        assert log.wait("lost", worker=liar.client.worker)["why"]
        assert all("what it said makes no sense" in one for one in why)
        assert [event["worker"] for event in log.of("lost")] == [liar.client.worker]
        for one in honest:
            one.close()


# -- what parses frames ------------------------------------------------------------------------------

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-3, 6) | st.sampled_from([1 << 53, 1 << 62])
WORDS = st.sampled_from(
    ("marks", "returned", "facts", "wanted", "why", "suspects", "host", "address", "port", "fingerprint", "number")
)
NOTES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=24,
)
MARKS = st.lists(st.lists(NUMBERS, min_size=3, max_size=5), max_size=4)
SAID = NOTES | st.fixed_dictionaries({"marks": MARKS, "returned": MARKS, "facts": NOTES, "wanted": NUMBERS})
TOLD = st.tuples(st.sampled_from(["left", "ends", "done", "expect", "waits"]), NUMBERS, NUMBERS, MARKS | NUMBERS)


def begun() -> StateMachine:
    """Two members that hold the state and places."""
    machine = StateMachine(Terms(max_workers=4, expected=2, start_s=SOON))
    for _ in range(2):
        machine.join(About("host", HERE, 1, {}), 0.0)
    for worker in range(2):
        machine.holds_state(worker, 1, 0, 0.0)
        machine.ask(worker, 1, Question(0, 0, PLACES, 1, 2), 0.0)
    return machine


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.lists(NUMBERS, min_size=8, max_size=8), SAID | TOLD), max_size=6))
def test_no_frame_of_one_member_takes_from_another(frames: list[tuple[int, list[int], Any]]) -> None:
    """Whatever it says, it is refused as an error of ours, and the other one's leases and done places are its own."""
    machine = begun()
    held = machine.ledger._ledger.held(1)
    for kind, numbers, note in frames:
        note = list(note) if isinstance(note, tuple) else note
        if machine.workers.get(0) is None:
            break
        try:
            dispatch(machine, 0, Frame(kind, tuple(numbers), None, note), 1.0)
        except MismatchError as error:
            machine.lost([0], str(error), 1.0)
        except PacelineError:
            pass
    assert machine.workers[1].member and machine.ledger._ledger.held(1) == held
    state = machine.ledger._ledger
    own = {place for *_, begin, end in held for place in range(begin, end)}
    assert not own & {place for begin, end in state.done_places(0, 0) for place in range(begin, end)}
    extent = state.extent(0, 0)
    assert extent is not None and extent[0] == PLACES


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.binary(max_size=64), NOTES)
def test_parsers_end_in_a_value_or_a_mismatch(head: bytes, text: bytes, note: Any) -> None:
    readers: list[Callable[[], object]] = [
        lambda: FrameHeader.read(head, 1 << 20),
        lambda: FrameHeader.read(header()[:12] + head[12:], 1 << 20),
        lambda: read_note(text),
        lambda: About.read(note),
        lambda: Generation.read(note),
        lambda: WorkerAddress.read(note),
        lambda: BreakNotice.read(note, 4),
    ]
    for read in readers:
        try:
            read()
        except MismatchError:
            continue


@given(st.dictionaries(st.sampled_from(["subject", "subjectAltName", "serialNumber"]), st.just(()), max_size=3))
def test_certificates_without_names_are_somebodys(certificate: dict[str, Any]) -> None:
    assert Identity.read(certificate).role == "host"
