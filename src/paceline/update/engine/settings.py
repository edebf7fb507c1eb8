# SPDX-License-Identifier: Apache-2.0
"""How a run is carried out; no setting changes the meaning of the rule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.communication import kinds
from paceline.communication.sockets.tls import TLS
from paceline.core.parse import is_whole
from paceline.errors import UnsupportedError
from paceline.update.exchange.outliers import Guard


@dataclass(frozen=True)
class Settings:
    """The settings of a run."""

    log: str | Path | None = None  # directory of the event log, or None
    timeout_s: float = 600.0  # deadline of every wait for another worker, seconds
    seed: int = 0  # of the order of samples; the same on every worker
    # "device" (beside the parameters) or "host" (in host memory, pinned if the model is on CUDA)
    outer_state: str = "device"
    scaler: Any = None  # the GradScaler, or None
    group: Any = None  # the torch.distributed group to use, or None for all processes
    tls: TLS | None = None  # certificates for paceline's own connections, or None for unencrypted ones
    # "auto" (as `paceline run --transport` says, else torch.distributed), "channel" (rings over our own sockets), "mpi"
    # or what another plugin brings
    transport: str = "auto"
    control: str | None = None  # HOST:PORT of the control plane of an elastic run, or None
    # HOST:PORT of the relay of an elastic run whose workers cannot all reach each other, or None
    relay: str | None = None
    # file that an elastic worker creates when its first exchange is committed, or None; it exists as well while the
    # worker waits to be needed
    exchanged: str | None = None
    guard: Guard | None = None  # against contributions that are far larger than usual, or None
    checkpoint: str | Path | None = None  # directory or URL of the run's steps, or None for no automatic checkpoints
    every_blocks: int = 100  # exchanges from one step to the next
    keep: int = 3  # steps that are kept
    # "shared", "own" if each worker has its own data, or "split" if zero lines split the program's loaders
    data: str = "shared"
    start: str | None = None  # checkpoint from which a run without steps of its own resumes, or None
    round: Any = None  # of a search, or None
    receipts: str | Path | None = None  # directory of the receipts, or None
    observers: tuple[str, ...] = ()  # names of what watches the run (`paceline.extensions.OBSERVERS`)

    def __post_init__(self) -> None:
        if self.outer_state not in ("device", "host"):
            raise UnsupportedError(f'outer_state must be "device" or "host", got {self.outer_state!r}')
        if self.data not in ("shared", "own", "split"):
            raise UnsupportedError(f'data must be "shared" or "own", got {self.data!r}')
        if self.transport not in ("auto", "channel") and self.transport not in (known := kinds()):
            raise UnsupportedError(f"transport must be one of {', '.join(known)}, got {self.transport!r}")
        if self.control is not None and self.transport == "mpi":
            raise UnsupportedError('transport="mpi" is not for elastic runs: an MPI job ends when it loses a process')
        if not isinstance(self.timeout_s, (int, float)) or not self.timeout_s > 0:
            raise UnsupportedError(f"timeout_s must be a number of seconds above 0, got {self.timeout_s!r}")
        if self.tls is not None and not isinstance(self.tls, TLS):
            raise UnsupportedError(
                "tls must be a paceline.TLS or the path of a folder with cert.pem, key.pem and ca.pem, got "
                f"{self.tls!r}"
            )
        if not isinstance(self.seed, int):
            raise UnsupportedError(f"seed must be a whole number, got {self.seed!r}")
        for name, value in (("every_blocks", self.every_blocks), ("keep", self.keep)):
            if not is_whole(value) or value < 1:
                raise UnsupportedError(f"{name} must be a whole number, at least 1, got {value!r}")
        if self.checkpoint is not None and not (isinstance(self.checkpoint, (str, Path)) and str(self.checkpoint)):
            raise UnsupportedError(f"checkpoint must be a directory or a URL, got {self.checkpoint!r}")
        if self.receipts is not None and not (isinstance(self.receipts, (str, Path)) and str(self.receipts)):
            raise UnsupportedError(f"receipts must be a directory, got {self.receipts!r}")
