# SPDX-License-Identifier: Apache-2.0
"""The rows: what a library needs, how a model is trained with it, and how many steps lie between two exchanges."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _emulate import EmulatedModel

from . import accelerate_row, hivemind_rows, paceline_rows, torch_rows, torchft_rows
from .fleet import Place, Service
from .setting import Setting, Trainer

Build = Callable[[EmulatedModel, Setting, Place], Trainer]


@dataclass(frozen=True)
class Row:
    """A way to train.

    Attributes:
        build: makes the model, an optimizer and the library work together.
        blocks: whether it exchanges once a block; else at every step.
        library: that must be installed.
        service: what runs on a host of its own.
        free: whether workers exchange when they find each other, and not after so many steps. Then a worker that waits
            for the others goes on training: the others may be waiting for it in an exchange.
    """

    build: Build
    blocks: bool = False
    library: str = "torch"
    service: Service | None = None
    free: bool = False

    def missing(self) -> str:
        """Why the row cannot be measured; empty where it can."""
        return "" if importlib.util.find_spec(self.library) else f"{self.library} is not installed"


def _torchft(build: Build, blocks: bool = True) -> Row:
    return Row(build, blocks, "torchft", torchft_rows.lighthouse)


def _hivemind(build: Build, free: bool = False) -> Row:
    return Row(build, True, "hivemind", hivemind_rows.first_peer, free)


def _paceline(text: str, blocks: bool = True, least: int | None = None) -> Row:
    return Row(paceline_rows.build(text, least), blocks, "paceline")


NOTHING = "no_exchange"
STREAMING = "diloco(period={period}, fragments={fragments}, overlap={fragment_overlap}"
ROWS: dict[str, Row] = {
    NOTHING: Row(torch_rows.no_exchange),
    "ddp": Row(torch_rows.ddp),
    "fsdp2": Row(torch_rows.fsdp2),
    "torchft_ddp": _torchft(torchft_rows.ddp, blocks=False),
    "paceline_sync": _paceline("sync", blocks=False),
    "accelerate_local_sgd": Row(accelerate_row.local_sgd, True, "accelerate"),
    "hivemind_averager": _hivemind(hivemind_rows.averager),
    "torchft_local_sgd": _torchft(torchft_rows.local_sgd),
    "torchft_diloco": _torchft(torchft_rows.diloco),
    "paceline_diloco": _paceline("diloco(period={period})"),
    "paceline_bmuf": _paceline("bmuf(period={period})"),
    "hivemind_optimizer": _hivemind(hivemind_rows.optimizer, free=True),
    "torchft_overlap": _torchft(torchft_rows.overlap),
    "paceline_bmuf_overlap": _paceline("bmuf(period={period}, overlap={period})"),
    "torchft_streaming": _torchft(torchft_rows.streaming),
    "paceline_streaming": _paceline(STREAMING + ")"),
    "paceline_streaming_4bit": _paceline("streaming_diloco(period={period})"),
}
MORE = {
    **{f"paceline_sync_chunks_{k}": _paceline(f"sync(chunks={k})", False, least=1) for k in (1, 2, 4, 8)},
    **{f"paceline_streaming_chunks_{k}": _paceline(f"{STREAMING}, chunks={k})", least=1) for k in (1, 4, 8)},
}
"""Measured where they are asked for: so many chunks, of any size."""


ALL = ROWS | MORE


def build(name: str, setting: Setting, place: Place) -> Trainer:
    """The row's trainer, with the same model on every worker."""
    torch.manual_seed(0)
    seconds = setting.compute_ms / 1e3
    model = EmulatedModel(setting.parameters, setting.layers, seconds / 3, 2 * seconds / 3)
    return ALL[name].build(model, setting, place)
