# SPDX-License-Identifier: Apache-2.0
"""What the workers of a ring say to each other, and what lies in their tensors' memory.

========  ===================================================  =========================================
kind      numbers                                              note
========  ===================================================  =========================================
HELLO     rank, milliseconds that the sender is patient        label of the connection
DATA      slot, number, role, signature, step, piece           none; the body is one piece
GRANT     slot, number, role, signature                        none: "I have come, send what is large"
BREAK     none                                                 who is lost, why, and how far the sender came
BYE       none                                                 none: the sender ends in order
========  ===================================================  =========================================
"""

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

import torch
from torch import Tensor

HELLO, DATA, GRANT, BREAK, BYE = 1, 2, 3, 4, 5

PIECE = 1 << 18
"""Bytes of a piece: what is on its way at a time on one hop, and what a reader holds besides the tensors."""
EAGER = 1 << 14
"""Bytes up to which a worker's part is sent without being asked for; of more, the receiver says that it has come."""
WINDOW = 8
"""Collectives of one slot under way; a further one begins when one of them is over."""
GRAIN = 1 << 15
"""Elements up to which torch adds in the thread that asks, and builds no team of threads for it."""

COLLECTIVE, RECEIVING, SENDING = 0, 1, 2


class Key(NamedTuple):
    """Names an operation within one worker.

    Attributes:
        slot: the channel or part, as :func:`slot_id` says.
        number: operations of this role in this slot, from 1; messages count for each partner.
        role: COLLECTIVE, RECEIVING or SENDING.
        peer: the partner of a message; -1 for a collective.
    """

    slot: int
    number: int
    role: int
    peer: int


def slot_id(label: str) -> int:
    """A number for a channel or part that is the same on all of its members."""
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:7], "little")


def signature(text: str) -> int:
    """A number that tells operations apart which do not belong together."""
    return zlib.crc32(text.encode())


def flat(x: Tensor) -> Tensor:
    """The elements of a contiguous tensor of the host in one dimension: the same memory, without autograd's books."""
    if not x.numel():
        return torch.empty(0, dtype=x.dtype)
    return torch.from_numpy(x.detach().reshape(-1).view(torch.uint8).numpy()).view(x.dtype)


def raw(x: Tensor) -> Tensor:
    """The bytes of a tensor of one dimension."""
    return x.view(torch.uint8)


def pieces_of(x: Tensor) -> list[Tensor]:
    """`x`, of one dimension, cut into pieces of at most `PIECE` bytes."""
    return list(torch.split(x, PIECE // x.element_size())) if x.numel() else []


def add(place: Tensor, more: Tensor) -> None:
    """`place += more`, without waking torch's threads."""
    for own, other in zip(torch.split(place, GRAIN), torch.split(more, GRAIN), strict=True):
        own.add_(other)
