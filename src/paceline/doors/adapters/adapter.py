# SPDX-License-Identifier: Apache-2.0
"""What the doors to training frameworks have in common: who is here, the run, and the training data.

A framework asks for its rank, for a name that all workers share and for the length of the data before it has made the
model that a run is attached to. So a door has a connection of its own beside the run's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.communication import Transport, connect, virtual
from paceline.communication.virtual.scheduler import Belonging
from paceline.core.flat import Modules
from paceline.core.world import World
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.data.sharing.shared_loader import SharedLoader
from paceline.errors import CheckpointError, UnsupportedError
from paceline.rules.rule import Rule
from paceline.run.attach import attach
from paceline.run.run import Run

OF_FRAMEWORK = {
    "checkpoint": "writes checkpoints itself, and paceline's state goes with them",
    "every_blocks": "says itself when a checkpoint is due",
    "keep": "says itself how many checkpoints are kept",
    "scaler": "makes the GradScaler, and the adapter hands it over",
    "group": "has no data parallelism of its own beside paceline's",
}
"""Settings of `attach` that belong to the framework, and why."""
UNSUPPORTED_RUNS = {
    "PACELINE_CONTROL": "workers that come and go (--elastic)",
    "PACELINE_ROUND": "the rounds of `paceline tune --search`",
}
"""Variables of runs in which the program's loop has to follow paceline's, and not the other way round."""
FOLDER = "paceline"
"""Where paceline's part of a checkpoint lies: a folder in the framework's, or beside its file with this ending."""


class Adapter:
    """One worker's way from a framework into a run.

    Args:
        framework: its name, for messages.
        rule: as for `paceline.attach`.
        settings: further settings of `paceline.attach`.

    Attributes:
        run: of the last training; None before the first.

    Raises:
        UnsupportedError: a setting belongs to the framework, or workers are to come and go.
    """

    def __init__(self, framework: str, rule: Rule | str | None, settings: dict[str, Any]) -> None:
        for name in OF_FRAMEWORK:
            if name in settings:
                raise UnsupportedError(f"{framework} {OF_FRAMEWORK[name]}; leave {name}= away")
        for variable, what in UNSUPPORTED_RUNS.items():
            if os.environ.get(variable):
                raise UnsupportedError(
                    f"{framework} keeps its own account of steps and epochs, which does not go with {what}; start "
                    "with `paceline run --workers N`, or write the loop by hand with paceline.attach"
                )
        self.framework, self._rule, self._settings = framework, rule, settings
        self.run: Run | None = None
        self._open = False

    # -- who is here ------------------------------------------------------------------------------

    @cached_property
    def transport(self) -> Transport:
        """The door's own connection."""
        timeout_s = float(self._settings.get("timeout_s") or os.environ.get("PACELINE_TIMEOUT_S", "600"))
        return connect(timeout_s)

    @property
    def world(self) -> World:
        """This worker."""
        return self.transport.world

    @property
    def distributed(self) -> bool:
        """Whether there are several workers."""
        return self.world.size > 1

    def gather_rows(self, x: Tensor) -> Tensor:
        """`x` of every worker, shape (N, *x.shape), on its device; every worker calls it."""
        wire = self.transport.wire_device(x.device)
        mine = x.detach().to(wire).reshape(-1)
        found = torch.empty(self.world.size, mine.numel(), dtype=mine.dtype, device=wire)
        self.transport.all_gather(found, mine.contiguous()).wait()
        return found.reshape(self.world.size, *x.shape).to(x.device)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """What worker `source` brings: a tensor, a path, or what JSON can say; every worker calls it."""
        if not self.distributed:
            return value
        if isinstance(value, Tensor):
            return self.gather_rows(value)[source]
        if isinstance(value, Path):
            return Path(self.broadcast(str(value), source))
        try:
            json.dumps(value)
        except TypeError as error:
            raise UnsupportedError(
                self.world.sign(
                    f"{self.framework} broadcasts a {type(value).__name__}, and nothing that would have to be "
                    "unpickled travels between workers; broadcast tensors, paths, or what JSON can say"
                )
            ) from error
        return self.transport.gather_json(value if self.world.rank == source else None)[source]

    # -- the run ----------------------------------------------------------------------------------

    @property
    def open_run(self) -> Run | None:
        """The run, while it is under way."""
        return self.run if self._open else None

    def attach(self, model: Modules, optimizers: Any, scaler: Any = None) -> Run:
        """Attach to what the framework has made."""
        self.run = attach(model, optimizers, self._rule, scaler=scaler, data="own", **self._settings)
        self._open = True
        return self.run

    def close(self) -> None:
        """Come to the end together, where a run is under way."""
        if self.run is not None and self._open:
            self._open = False
            self.run.close()

    def abandon(self) -> None:
        """Leave at once, after an error."""
        if self.run is not None and self._open:
            self._open = False
            self.run.abandon()

    def resume(self, folder: Path, minibatches: int | None = None) -> None:
        """Put the run back to where a checkpoint of the framework was written.

        Args:
            folder: paceline's part of it.
            minibatches: that the framework's part was written at; None where it does not say.

        Raises:
            CheckpointError: there is none, or it was written at another time than the framework's.
        """
        assert self.run is not None
        self.run.resume(folder)
        if minibatches is not None and self.run.minibatches != minibatches:
            raise CheckpointError(
                self.world.sign(
                    f"{folder} was written after {self.run.minibatches} minibatches and the checkpoint of "
                    f"{self.framework} beside it after {minibatches}; they belong to different steps: take another one"
                )
            )

    # -- data -------------------------------------------------------------------------------------

    def share(self, loader: Any) -> SharedLoader:
        """This worker's part of a loader, as many batches as every other worker has."""
        if self._open and self.run is not None:
            return self.run.share(loader, even=True)
        return LoaderRegistry(self.world, self._settings.get("seed", 0), lambda epoch, batches: None).share(
            loader, even=True
        )

    # -- several workers in one process -----------------------------------------------------------

    def belongs(self, belonging: Belonging) -> None:
        """Under a simulation, `belonging` moves with this worker's turn."""
        here = virtual.current()
        if here is not None:
            here.cluster.keep(here.world.rank, belonging)


class AdapterLoader:
    """A loader of which each worker sees its part, for a loop that is the framework's.

    Frameworks count batches and leave a pass after its last one without asking for another; then the pass is brought
    to its end when the next one begins.

    Args:
        loader: the user's.
        door: the worker's.
        epoch: gives the number of the epoch that the framework begins, where it has one.
    """

    def __init__(self, loader: Any, adapter: Adapter, epoch: Callable[[], int] | None = None) -> None:
        self.loader, self._adapter, self._epoch = loader, adapter, epoch
        self._length: int | None = None
        self._pass: tuple[SharedLoader, Iterator[Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Batches of this worker in an epoch; known before the run is attached."""
        if self._length is None:
            self._length = len(self._adapter.share(self.loader))
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch."""
        self._finish()
        self._adapter.share(self.loader).set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._adapter.open_run is None:
            raise UnsupportedError(
                self._adapter.world.sign(
                    f"{self._adapter.framework} goes through the training data before paceline is attached; give the "
                    "data set a length, or begin the training first"
                )
            )
        if self._epoch is not None:
            self.set_epoch(self._epoch())
        self._finish()
        share = self._adapter.share(self.loader)
        batches = iter(share)
        self._pass = share, batches
        for batch in batches:  # not `yield from`: a pass that is left has to stay where it is until it is finished
            yield self.placed(batch, share)
        self._pass = None

    def placed(self, batch: Any, share: SharedLoader) -> Any:
        """The batch as the framework wants it."""
        return batch

    def _finish(self) -> None:
        """Bring the last pass to its end, if all its batches were handed out."""
        if self._pass is not None:
            share, batches = self._pass
            self._pass = None
            if share.progress >= 1.0:
                next(batches, None)
