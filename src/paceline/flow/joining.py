# SPDX-License-Identifier: Apache-2.0
"""How a worker of an elastic run gets the run's state, and when it reports that it holds it.

A joining worker loads the state that a live worker sent, and holds it from then on. If no member holds one (at the
start, or after all holders are lost), all members start from rank 0's model, and mostly resume from a checkpoint at
once. Until then none reports that it holds the state: the control plane could else have an untrained model saved as
the newest step, or sent to joining workers. So a worker reports it after `run.resume`, or, if the program does not
call that, before the first batch or step.

A state is sent over the members' own connection, as a checkpoint:

::

    keys      to the live worker: the joining one's keys of its frozen tensors (:func:`paceline.core.bits.key`)
    lengths   int64, shape (2,): bytes of the text, bytes of the tensors
    text      JSON: the state without its tensors, and the sha256 sum of the tensors' bytes
    tensors   safetensors, as one piece

Frozen tensors whose keys all joining workers have are not sent. None of it is ever executed. The receiver checks the
sum before it loads anything; the next exchange compares its model with the other members'.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.communication.base import AGREEMENT, Pending, Transport
from paceline.core.bits import KEY_CHARACTERS
from paceline.core.state_tree import build, flatten
from paceline.errors import CheckpointError, PeerLostError
from paceline.flow.membership import ElasticMembership
from paceline.update.engine import agreement
from paceline.update.engine.agreement import take_untrained
from paceline.update.monitor import Monitor

if TYPE_CHECKING:
    from paceline.core.flat import Fragment
    from paceline.core.optimizer_state import Owned
    from paceline.update.engine.blocks.model import FragmentedModel

logger = logging.getLogger("paceline")
TEXT_LIMIT = 1 << 28
"""Bytes of the text, at most."""


class GivenState(OldCheckpoint):
    """The state that a live worker sent, read as a checkpoint of one worker."""

    def __init__(self, rest: Any, tensors: dict[str, Tensor]) -> None:
        super().__init__({"size": 1}, _not_sent)
        self._rests = {0: rest["state"]}
        self._tensors = [tensors]
        self._model = build(rest["model"], tensors)

    def model(self) -> dict[str, Tensor]:
        """The global model."""
        result: dict[str, Tensor] = self._model
        return result


def tell_held(transport: Transport, to: int, keys: dict[str, str]) -> Pending | None:
    """Start to tell a live worker the keys of this worker's frozen tensors, if there are any."""
    return transport.send(_bytes("".join(keys.values()).encode()), to) if keys else None


def held_by(transport: Transport, ranks: Sequence[int], keys: dict[str, str]) -> dict[str, str]:
    """Those of this worker's frozen tensors, name -> key, that all joining workers hold; theirs have the same names.

    Raises:
        PeerLostError: one of them does not tell.
    """
    held = keys
    for rank in ranks if keys else ():
        announced = torch.empty(KEY_CHARACTERS * len(keys), dtype=torch.uint8)
        transport.receive(announced, rank).wait()
        text = announced.numpy().tobytes().decode("latin-1")
        theirs = {name: text[KEY_CHARACTERS * n :][:KEY_CHARACTERS] for n, name in enumerate(keys)}
        held = {name: one for name, one in held.items() if theirs[name] == one}
    return held


def pack_state(state: dict[str, Any], model: dict[str, Tensor]) -> list[Tensor]:
    """What is sent of a state, as a checkpoint of one worker has it, and of the global model."""
    tensors: dict[str, Tensor] = {}
    rest = {"state": flatten(state, tensors, "state"), "model": flatten(model, tensors, "model")}
    blob = save({name: _own(tensor) for name, tensor in tensors.items()})
    text = json.dumps({**rest, "sha256": hashlib.sha256(blob).hexdigest()}).encode()
    return [torch.tensor([len(text), len(blob)]), _bytes(text), _bytes(blob)]


def receive_state(transport: Transport, source: int, limit: int) -> GivenState:
    """Receive the state from `source`, with at most `limit` bytes of tensors.

    Raises:
        PeerLostError: it did not arrive.
        CheckpointError: it is damaged or malformed.
    """
    lengths = torch.zeros(2, dtype=torch.int64)
    transport.receive(lengths, source).wait()
    text_bytes, blob_bytes = lengths.tolist()
    who = transport.world.name(source)
    if not (0 < text_bytes <= TEXT_LIMIT and 0 < blob_bytes <= limit):
        raise CheckpointError(
            f"{who} announces a state of {text_bytes} and {blob_bytes} bytes; at most {TEXT_LIMIT} and {limit} are "
            "taken for this model"
        )
    text, blob = torch.empty(text_bytes, dtype=torch.uint8), torch.empty(blob_bytes, dtype=torch.uint8)
    for part in (text, blob):
        transport.receive(part, source).wait()
    raw = blob.numpy().tobytes()
    try:
        rest = json.loads(text.numpy().tobytes())
        if hashlib.sha256(raw).hexdigest() != rest["sha256"]:
            raise CheckpointError(f"the state that {who} gave arrived damaged: its sha256 sum is another")
        return GivenState(rest, load(raw))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"what {who} gave is no state: {error}") from error


def _not_sent(name: str, key: str) -> Tensor:
    raise CheckpointError(f"{name} was frozen and is not sent to a worker that has it, and this one has changed it")


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Donor:
    """Sends this worker's state to joining workers, if the control plane names it the donor."""

    def __init__(
        self,
        membership: ElasticMembership,
        monitor: Monitor,
        # gives the state and the global model for joining workers that hold the frozen tensors of these keys
        given: Callable[[dict[str, str]], tuple[dict[str, Any], dict[str, Any]]],
        frozen_keys: Callable[[], dict[str, str]],
    ) -> None:
        self._membership, self._monitor, self._given, self._frozen_keys = membership, monitor, given, frozen_keys
        self._sending: list[Pending] = []  # held until sent, or replaced by later ones

    def give(self) -> None:
        """If this worker is the donor, send the state to the generation's joining workers, in the background."""
        membership, generation = self._membership, self._membership.generation
        if generation.donor != membership.control.worker or not generation.newcomers:
            return
        ranks = [membership.rank_of(worker) for worker in sorted(generation.newcomers)]
        self._sending = []
        try:
            parts = pack_state(*self._given(held_by(membership.transport, ranks, self._frozen_keys())))
            for rank in ranks:
                for part in parts:
                    self._sending.append(membership.transport.send(part, rank))
        except PeerLostError:
            return  # the members will change again
        self._monitor.note("gave", workers=sorted(generation.newcomers), bytes=sum(part.nbytes for part in parts))


class Joining:
    """Gets the run's state for a worker."""

    def __init__(
        self,
        membership: ElasticMembership,
        owned: Owned,
        parts: list[Fragment],  # the exchanged tensors, which all members start with alike
        rest: Sequence[tuple[str, Tensor]] = (),  # what is not exchanged, by name
        frozen_keys: Callable[[], dict[str, str]] = dict,  # gives the keys of the large ones of them
    ) -> None:
        self._membership, self._owned, self._parts, self._rest = membership, owned, parts, rest
        self._frozen_keys = frozen_keys
        self._keys = frozen_keys()  # before this worker is a member, and others wait for it
        self.given: GivenState | None = None  # what a live worker sent, if this worker joined
        self.must_resume = False  # whether all workers that held the model are lost, so that only a checkpoint has it
        self.settled = False  # whether this worker has reported that it holds the state
        self.put: Callable[[GivenState], None] = lambda given: None  # loads the given state
        self.blocks: FragmentedModel | None = None  # this worker's
        self.wanted: Callable[[], int] = lambda: 0  # members that are wanted, as this worker's state says

    def start(self) -> None:
        """Receive the donor's state, or start with all members from rank 0's model."""
        membership, self.given = self._membership, None
        while True:
            try:
                if membership.new and membership.generation.donor is not None:
                    limit = (1 << 26) + 256 * sum(p.numel() for _, named in self._owned for _, p in named)
                    limit += sum(t.numel() * t.element_size() for _, t in self._rest)
                    limit += 32 * sum(part.numel for part in self._parts)
                    donor = membership.rank_of(membership.generation.donor)
                    announced = tell_held(membership.transport, donor, self._keys)
                    self.given = receive_state(membership.transport, donor, limit)
                    if announced is not None:
                        announced.wait()
                    self.must_resume = False
                else:
                    self.must_resume = membership.generation.restored
                    with membership.transport.calling(AGREEMENT):  # other members are in attach
                        agreement.broadcast_start(membership.transport, self._parts)
                        take_untrained(membership.transport, self._rest)
                return
            except PeerLostError as error:
                membership.renew(membership.failed(error))

    def take_given(self, put: Callable[[GivenState], None] | None = None) -> None:
        """Load the given state, if any, by `put` from now on, and report that this worker holds it."""
        self.put = put or self.put
        while self.given is not None and not self.settled:
            self.put(self.given)
            self._report_state()

    def ready(self) -> None:
        """Before the first batch, step or exchange: report that this worker holds its initial state.

        Raises:
            CheckpointError: only a checkpoint has the model, and the program has not called `run.resume`.
        """
        while not self.settled:
            if self.must_resume:
                raise CheckpointError(
                    self._membership.transport.world.sign(
                        "every worker that held the model of this run is gone, so that it goes on from its last "
                        "checkpoint only: call run.resume() before the training loop, or start a new run in another "
                        "log directory"
                    )
                )
            self._report_state()

    def resume(self, resume: Callable[[], bool]) -> bool:
        """Resume from a checkpoint, all members together; repeated if they change meanwhile.

        Returns:
            True if there was one, as `resume` says, or a live worker sent this worker the state.
        """
        if self.settled:
            return self.given is not None or resume()
        result = False
        while not self.settled:
            try:
                result = resume()
            except PeerLostError as error:
                self._membership.renew(self._membership.failed(error))
                self._start_again()  # the members have changed
                continue
            if self.must_resume and not result:
                logger.warning("%s", self._membership.transport.world.sign(ANEW))
            self.must_resume = False
            self._report_state()
        self._membership.follow_control()  # workers that the checkpoint wants may have joined
        return result or self.given is not None

    def _report_state(self) -> None:
        """Report that this worker holds the state; it is not settled if the members had changed before."""
        membership = self._membership
        membership.control.holds_state(
            membership.generation.number, self.blocks.block if self.blocks is not None else 0, self.wanted()
        )
        membership.control.ledger()  # its answer follows all earlier messages
        self.settled = (
            not membership.outdated or membership.control.worker not in membership.control.generation.newcomers
        )
        if self.settled:
            membership.applied = membership.generation.exchange
            if self.blocks is not None:
                self.blocks.renumber(membership.transport.world.size)  # all members compare the same sums
            return
        membership.renew(membership.control.generation)
        self._start_again()

    def _start_again(self) -> None:
        self._keys = self._frozen_keys()  # a state may have been loaded
        self.start()
        if self.blocks is not None:
            self.blocks.capture()
        self.take_given()


ANEW = (
    "every worker that held the model of this run is gone, and no step of it was written yet: the training begins anew"
)
