# SPDX-License-Identifier: Apache-2.0
"""Checks under `--random-data` that no two workers train on the same samples.

Each worker hashes what goes into the model before each of its first steps. The workers compare the first step's, and
where two are equal (as from a fixed initial state) those of all, after `STEPS` steps or at the end of the program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.run.run import Run
from paceline_plugins.zero import refusals
from paceline_plugins.zero.reporter import Reporter

STEPS = 8
CALLS = 8
"""So many calls of modules are looked at before a step, unless a root of the model takes tensors."""
VALUES = 1024
"""How many values of a tensor are hashed."""


class OwnSamples:
    """The first samples of a worker.

    Args:
        reporter: prints messages.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._digest = hashlib.blake2b(digest_size=8)
        self._steps: list[str] = []  # hashes of what went into the model
        self._calls = 0
        self._open, self._again = True, False

    def called(self, module: nn.Module, roots: list[nn.Module], args: Any) -> None:
        """A module of the model is called."""
        if not self._open or self._calls >= CALLS or not torch.is_grad_enabled():
            return
        given = [tensor for tensor in _tensors(args) if tensor.numel() and not tensor.requires_grad]
        for tensor in given:
            flat = tensor.detach().reshape(-1)
            part = flat[:: max(1, len(flat) // VALUES)].cpu()
            self._digest.update(f"{tuple(tensor.shape)} {part.tolist()}".encode())
        if given:
            self._calls += CALLS if any(module is root for root in roots) else 1

    def stepped(self, run: Run, where: str) -> None:
        """The optimizer steps.

        Raises:
            Refusal: two workers trained on the same samples; raised on every worker.
        """
        if not self._open:
            return
        self._steps.append(self._digest.hexdigest() if self._calls else "")
        self._calls = 0
        if len(self._steps) in (1, STEPS):
            self._compare(run, where)

    def finish(self, run: Run, where: str) -> None:
        """The program has ended; as `stepped`."""
        while self._open:
            self._compare(run, where)

    def _compare(self, run: Run, where: str) -> None:
        everyone: list[list[str]] = run.messages.gather(self._steps)
        common = min(map(len, everyone))
        firsts = ["".join(one[:common]) for one in everyone]
        alike = next(((firsts.index(one), rank) for rank, one in enumerate(firsts) if one in firsts[:rank]), None)
        self._open, self._again = alike is not None and not self._again, True
        if alike is None or self._open:
            return
        if any(firsts):
            raise refusals.same_samples(where, *alike, common)
        self._reporter.say(
            f"{where}: no tensor goes into the model as an argument, so that it is unknown whether each worker draws "
            "samples of its own"
        )


def _tensors(value: Any, deep: int = 3) -> Iterator[Tensor]:
    """The tensors in the arguments of a call."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and value.device.type != "meta":
            yield value
    elif deep and isinstance(value, dict):
        yield from _tensors(list(value.values()), deep - 1)
    elif deep and isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one, deep - 1)
