# SPDX-License-Identifier: Apache-2.0
"""The frames between the workers of a ring, and helpers for the memory of their tensors.

========  ===================================================  =========================================
kind      numbers                                              note
========  ===================================================  =========================================
HELLO     rank, the sender's timeout in milliseconds           label of the connection
DATA      sequence, number, role, signature, step, piece       none; the body is one piece
GRANT     sequence, number, role, signature                    none: "I have begun it, send large data"
BREAK     none                                                 a `BreakNotice`
BYE       none                                                 none: the sender closes in order
========  ===================================================  =========================================
"""

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

HELLO, DATA, GRANT, BREAK, BYE = 1, 2, 3, 4, 5

PIECE, LEAST_PIECE = 1 << 21, 1 << 18
"""Bytes of a piece, at most and at least: in flight at a time on one hop, and held by a reader besides the tensors."""
EAGER = 1 << 14
"""Largest part, in bytes, that a worker sends without a grant."""
WINDOW = 8
"""Most collectives of one sequence in flight; a further one begins when one of them completes."""
GRAIN = 1 << 15
"""Most elements that torch adds in the calling thread, without its thread pool."""

COLLECTIVE, RECEIVING, SENDING = 0, 1, 2


class Address(NamedTuple):
    """Where a member listens, and what its certificate has to say: a role or an ID, see `sockets.identity`.

    `relayed` is its address at a relay, which only the run's dialer reads (`extensions.DIALERS`); empty without one.
    """

    address: str
    port: int
    certificate: str = ""
    relayed: str = ""


class Key(NamedTuple):
    """Identifies an operation within one worker.

    Attributes:
        sequence: the channel or subgroup, as :func:`sequence_id` gives it.
        number: counts the operations of this role in the sequence, from 1; messages are counted for each peer.
        role: COLLECTIVE, RECEIVING or SENDING.
        peer: the peer of a message; -1 for a collective.
    """

    sequence: int
    number: int
    role: int
    peer: int


def sequence_id(label: str) -> int:
    """A number for a channel or subgroup, the same on all of its members."""
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:7], "little")


def signature(text: str) -> int:
    """A number that differs between operations that do not match."""
    return zlib.crc32(text.encode())


def raw(x: Tensor) -> Tensor:
    """The bytes of a one-dimensional tensor."""
    return x.view(torch.uint8)


def pieces_of(x: Tensor) -> list[Tensor]:
    """`x`, one-dimensional, cut into about eight pieces: few frames, and the next hop soon has something to send."""
    size = min(PIECE, max(LEAST_PIECE, x.nbytes // 8))
    return list(torch.split(x, size // x.element_size())) if x.numel() else []


def add(place: Tensor, more: Tensor) -> None:
    """`place += more`, without torch's thread pool."""
    for own, other in zip(torch.split(place, GRAIN), torch.split(more, GRAIN), strict=True):
        own.add_(other)
