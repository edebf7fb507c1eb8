# SPDX-License-Identifier: Apache-2.0
"""The state that a live worker sends to a joining one: a checkpoint over the members' own connection.

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
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.communication.base import Pending, Transport
from paceline.core.bits import KEY_CHARACTERS
from paceline.core.state_tree import build, flatten
from paceline.errors import CheckpointError

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
        found: dict[str, Tensor] = self._model
        return found


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
        told = torch.empty(KEY_CHARACTERS * len(keys), dtype=torch.uint8)
        transport.receive(told, rank).wait()
        text = told.numpy().tobytes().decode("latin-1")
        theirs = {name: text[KEY_CHARACTERS * n :][:KEY_CHARACTERS] for n, name in enumerate(keys)}
        held = {name: one for name, one in held.items() if theirs[name] == one}
    return held


class PackedState:
    """A snapshot of a state, ready to be sent to several workers.

    Args:
        state: as a checkpoint of one worker has it.
        model: the global model, name -> tensor.
    """

    def __init__(self, state: dict[str, Any], model: dict[str, Tensor]) -> None:
        tensors: dict[str, Tensor] = {}
        rest = {"state": flatten(state, tensors, "state"), "model": flatten(model, tensors, "model")}
        blob = save({name: _own(tensor) for name, tensor in tensors.items()})
        text = json.dumps({**rest, "sha256": hashlib.sha256(blob).hexdigest()}).encode()
        self._parts = [torch.tensor([len(text), len(blob)]), _bytes(text), _bytes(blob)]

    @property
    def nbytes(self) -> int:
        """Bytes sent to each worker."""
        return sum(part.numel() * part.element_size() for part in self._parts)

    def give(self, transport: Transport, to: int) -> list[Pending]:
        """Start to send it to `to`."""
        return [transport.send(part, to) for part in self._parts]


def receive_state(transport: Transport, source: int, limit: int) -> GivenState:
    """Receive the state from `source`.

    Args:
        limit: bytes of tensors, at most.

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
