# SPDX-License-Identifier: Apache-2.0
"""Each worker's present call, compared before anything is exchanged, so that different calls are detected at once.

Every operation among all workers begins with a row of one shape: an exchange of the training with its header, a call
such as `run.save` with the row made here. So workers that make different calls compare their rows before they send
tensors of different sizes, which would make the back ends abort.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.world import World
from paceline.errors import ElsewhereError

WORDS = 11
"""Integers of a row."""
KIND, LEAVING, SIZE = 1, 3, 8
"""Places in a row: its kind (CALL or below for a call), whether the worker ends, bytes that follow."""
CALL = -10
BLOCK = 1000
"""Kind of the exchange of a block's first fragment; the other fragments' follow."""
AGREEMENT = "an agreement of all workers"

_ADVICE = {
    AGREEMENT: "every worker has to make the same calls in the same order",
    "run.save(..)": "for the model alone, rank 0 may write torch.save(run.global_state(), FILE) by itself",
    "run.resume(..)": "",
    "run.restore(..)": "",
    "run.merge()": "run.global_state() and run.model_for_export() need no other worker",
    "run.messages.broadcast(..)": "",
    "run.messages.all_reduce(..)": "",
    "run.messages.all_gather(..)": "",
    "run.messages.gather(..)": "",
    "run.messages.barrier()": "",
    "run.close()": "",
    "run.checkpoint()": "",
}
_NAMES = list(_ADVICE)


def row(call: str, size: int) -> Tensor:
    """The row of `call`, one of those above, int64, shape (WORDS,); `size` bytes follow."""
    values = [0] * WORDS
    values[KIND], values[SIZE] = CALL - _NAMES.index(call), size
    return torch.tensor(values, dtype=torch.int64)


def check_alike(kinds: Sequence[int], leaving: Sequence[bool], world: World) -> None:
    """Raise ElsewhereError, on every worker alike, if the workers make different calls.

    Args:
        kinds: of the workers' rows, in rank order.
        leaving: which of the workers end.
        world: this worker.
    """
    called = [_NAMES[CALL - kind] for kind in kinds if kind <= CALL]
    if not called or (len(called) == len(kinds) and len(set(called)) == 1):
        return
    where: dict[str, list[int]] = {}
    for rank, (kind, leaves) in enumerate(zip(kinds, leaving, strict=True)):
        where.setdefault(_doing(kind, leaves), []).append(rank)
    calls = ", ".join(f"{world.names(ranks)} {doing}" for doing, ranks in where.items())
    raise ElsewhereError(world.sign(f"the workers make different calls: {calls}. {advice(called[0])}"))


def advice(call: str) -> str:
    """What to do if some workers do not make `call`."""
    if call == AGREEMENT:
        return f"{_ADVICE[call][0].upper()}{_ADVICE[call][1:]}"
    more = f" ({_ADVICE[call]})" if _ADVICE[call] else ""
    return (
        f"Every worker has to call {call} at the same place of the program: take it out of "
        f"`if run.world.rank == 0:` or whatever keeps some workers from it{more}"
    )


def _doing(kind: int, leaves: bool) -> str:
    """What a worker with this row does; follows its name."""
    if kind <= CALL:
        return f"in {_NAMES[CALL - kind]}"
    if leaves:
        return "at its end, in run.close()"
    if kind == 0:
        return "in run.share, at the end of its pass"
    if kind >= BLOCK:
        return "in optimizer.step(), at the end of a block"
    return "in backward() or optimizer.step(), exchanging gradients" if kind > 0 else "in optimizer.step()"
