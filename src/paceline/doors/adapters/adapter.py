# SPDX-License-Identifier: Apache-2.0
"""The common part of the adapters for frameworks: the world, the run, and the training data.

A framework asks for its rank, for broadcasts and for the length of the data before it has a model to attach to. So an
adapter has a connection of its own beside the run's.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.communication import Transport, connect, virtual
from paceline.communication.virtual.transport import Belonging
from paceline.core.flat import Modules
from paceline.core.world import World
from paceline.data.sharing.loader_registry import LoaderRegistry, SharedLoader
from paceline.errors import CheckpointError, UnsupportedError
from paceline.rules.rule import Rule
from paceline.run.attach import attach
from paceline.run.run import Run

OF_FRAMEWORK = {
    "checkpoint": "writes checkpoints itself, and paceline's state goes with them",
    "every_blocks": "decides itself when to write a checkpoint",
    "keep": "decides itself how many checkpoints to keep",
    "scaler": "makes the GradScaler, and the adapter passes it on",
    "group": "has no data parallelism beside paceline's",
}
"""Settings of `attach` that belong to the framework, and why."""
UNSUPPORTED_RUNS = {
    "PACELINE_CONTROL": "workers that come and go (--elastic)",
    "PACELINE_ROUND": "the rounds of `paceline tune --search`",
}
"""Variables of runs in which paceline controls the training loop."""
FOLDER = "paceline"
"""Folder of paceline's part of a checkpoint, in the framework's folder; or the ending of a folder beside its file."""


class Adapter:
    """Connects a framework to a run, on one worker.

    Args:
        framework: its name, for messages.
        rule: as for `paceline.attach`.
        settings: further settings of `paceline.attach`.

    Attributes:
        run: of the last training; None before the first.

    Raises:
        UnsupportedError: a setting belongs to the framework, or the run is elastic or a search.
    """

    def __init__(self, framework: str, rule: Rule | str | None, settings: dict[str, Any]) -> None:
        for name in OF_FRAMEWORK:
            if name in settings:
                raise UnsupportedError(f"{framework} {OF_FRAMEWORK[name]}; leave {name}= out")
        for variable, what in UNSUPPORTED_RUNS.items():
            if os.environ.get(variable):
                raise UnsupportedError(
                    f"{framework} counts steps and epochs itself, which excludes {what}; start "
                    "with `paceline run --workers N`, or write the loop by hand with paceline.attach"
                )
        self.framework, self._rule, self._settings = framework, rule, settings
        self.run: Run | None = None
        self._open = False

    # -- the workers ------------------------------------------------------------------------------

    @cached_property
    def transport(self) -> Transport:
        """The adapter's own connection."""
        timeout_s = float(self._settings.get("timeout_s") or os.environ.get("PACELINE_TIMEOUT_S", "600"))
        return connect(timeout_s)

    @property
    def world(self) -> World:
        return self.transport.world

    def unsupported(self, message: str) -> UnsupportedError:
        """An error with this worker's rank and host."""
        return UnsupportedError(self.world.sign(message))

    @property
    def distributed(self) -> bool:
        """Whether there are several workers."""
        return self.world.size > 1

    def gather_rows(self, x: Tensor) -> Tensor:
        """All-gather: `x` of every worker, shape (N, *x.shape), on its device."""
        wire = self.transport.wire_device(x.device)
        mine = x.detach().to(wire).reshape(-1)
        result = torch.empty(self.world.size, mine.numel(), dtype=mine.dtype, device=wire)
        self.transport.all_gather(result, mine.contiguous()).wait()
        return result.reshape(self.world.size, *x.shape).to(x.device)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Broadcast worker `source`'s tensor, path or JSON value."""
        if not self.distributed:
            return value
        if isinstance(value, Tensor):
            return self.gather_rows(value)[source]
        if isinstance(value, Path):
            return Path(self.broadcast(str(value), source))
        try:
            json.dumps(value)
        except TypeError as error:
            raise self.unsupported(
                f"{self.framework} broadcasts a {type(value).__name__}, and paceline sends no pickled objects; "
                "broadcast tensors, paths, or JSON values"
            ) from error
        return self.transport.gather_json(value if self.world.rank == source else None)[source]

    # -- the run ----------------------------------------------------------------------------------

    @property
    def open_run(self) -> Run | None:
        """The run, until it is closed."""
        return self.run if self._open else None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Excludes backward passes from the exchange of gradients, while a run is open."""
        return self.open_run.no_sync() if self.open_run is not None else contextlib.nullcontext()

    def global_model(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, the model holds the global parameters, while a run is open."""
        return self.open_run.global_model() if self.open_run is not None else contextlib.nullcontext()

    def attach(self, model: Modules, optimizers: Any, scaler: Any = None) -> Run:
        """Attach to the framework's model and optimizers."""
        self.run = attach(model, optimizers, self._rule, scaler=scaler, data="own", **self._settings)
        self._open = True
        return self.run

    def close(self) -> None:
        """Close the run, if one is open."""
        if self.run is not None and self._open:
            self._open = False
            self.run.close()

    def abandon(self) -> None:
        """Leave at once, after an error."""
        if self.run is not None and self._open:
            self._open = False
            self.run.abandon()

    def resume(self, folder: Path, minibatches: int | None = None) -> None:
        """Resume the run from a checkpoint of the framework.

        Args:
            folder: paceline's part of it.
            minibatches: at which the framework's part was written; None if unknown.

        Raises:
            CheckpointError: it is missing, or was written at another step than the framework's.
        """
        assert self.run is not None
        self.run.resume(folder)
        if minibatches is not None and self.run.minibatches != minibatches:
            raise CheckpointError(
                self.world.sign(
                    f"{folder} was written after {self.run.minibatches} minibatches and the checkpoint of "
                    f"{self.framework} beside it after {minibatches}; they belong to different steps: use another one"
                )
            )

    # -- data -------------------------------------------------------------------------------------

    def share(self, loader: Any) -> SharedLoader:
        """This worker's part of a loader, with equally many batches on every worker."""
        if self._open and self.run is not None:
            return self.run.share(loader, even=True)
        return LoaderRegistry(self.world, self._settings.get("seed", 0), lambda epoch, batches: None).share(
            loader, even=True
        )

    # -- several workers in one process -----------------------------------------------------------

    def belongs(self, belonging: Belonging) -> None:
        """In a simulation, give this virtual worker a state of its own."""
        here = virtual.current()
        if here is not None:
            here.cluster.keep(here.world.rank, belonging)


class AdapterLoader:
    """A worker's part of a loader, for a framework's training loop.

    Frameworks count batches, and stop iterating after the last one; the next pass then finishes the iterator.

    Args:
        loader: the user's.
        adapter: the worker's.
        epoch: returns the framework's number of the epoch, if it has one.
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
        """Batches of this worker in an epoch, also before the run is attached."""
        if self._length is None:
            self._length = len(self._adapter.share(self.loader))
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch."""
        self._finish()
        self._adapter.share(self.loader).set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._adapter.open_run is None:
            raise self._adapter.unsupported(
                f"{self._adapter.framework} iterates over the training data before paceline is attached; give "
                "the data set a length, or start the training first"
            )
        if self._epoch is not None:
            self.set_epoch(self._epoch())
        self._finish()
        share = self._adapter.share(self.loader)
        batches = iter(share)
        self._pass = share, batches
        for batch in batches:  # not `yield from`, which would close an iterator that the framework leaves
            yield self.placed(batch, share)
        self._pass = None

    def placed(self, batch: Any, share: SharedLoader) -> Any:
        """Convert a batch for the framework."""
        return batch

    def _finish(self) -> None:
        """Finish the last pass, if all its batches were used."""
        if self._pass is not None:
            share, batches = self._pass
            self._pass = None
            if share.progress >= 1.0:
                next(batches, None)
