# SPDX-License-Identifier: Apache-2.0
"""A run's data: the loaders it shares, how far each is, and how many samples the present step stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from paceline.data.share import Position, Share
from paceline.errors import UnsupportedError
from paceline.world import World


class Feed:
    """Shares loaders among the workers and counts what they hand out.

    Args:
        world: this worker.
        seed: of the order of samples.
        began: called with (epoch, number of batches or None) at the start of every pass.
    """

    def __init__(self, world: World, seed: int, began: Callable[[int, int | None], None]) -> None:
        self._world, self._seed, self._began = world, seed, began
        self._positions: dict[int, Position] = {}
        self._shares: dict[int, Share] = {}
        self._kept: list[Any] = []  # whose ids are keys above
        self._loaded: list[dict[str, Any]] = []
        self.samples = 0
        self._since = [0, 0, 0]  # samples, batches and nominal samples handed out since the last step

    def share(self, loader: Iterable[Any]) -> Share:
        """The worker's part of `loader`; the same object for the same loader, the same position for the same data."""
        if id(loader) in self._shares:
            return self._shares[id(loader)]
        data = getattr(loader, "dataset", loader)  # a loader may be built anew for each epoch; its data are the same
        if id(data) not in self._positions:
            position = self._positions[id(data)] = Position()
            if len(self._loaded) >= len(self._positions):
                position.load(self._loaded[len(self._positions) - 1])
        share = Share(loader, self._world, self._seed, self._positions[id(data)], self._handed_out, self._began)
        self._shares[id(loader)] = share
        self._kept += [data, loader]
        return share

    def _handed_out(self, samples: int, nominal: int) -> None:
        self._since[0] += samples
        self._since[1] += 1
        self._since[2] += nominal

    @property
    def epoch(self) -> int:
        """The epoch of the first loader that is under way or comes next."""
        for position in self._positions.values():
            return position.epoch
        return int(self._loaded[0]["epoch"]) if self._loaded else 0

    @property
    def factor(self) -> float:
        """Samples since the last step in parts of full batches; 1 where nobody counts."""
        samples, batches, nominal = self._since
        return samples / nominal if batches and samples and nominal else 1.0

    def stepped(self) -> int:
        """A step was made of what was handed out: the number of samples in it."""
        new = self._since[0]
        self.samples += new
        self._since = [0, 0, 0]
        return new

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        positions = [position.state() for position in self._positions.values()]
        return {"samples": self.samples, "since": self._since, "positions": positions}

    def load(self, state: dict[str, Any]) -> None:
        """From the checkpoint; loaders that are shared later find their place, too."""
        self.samples, self._since, self._loaded = state["samples"], state["since"], state["positions"]
        for position, saved in zip(self._positions.values(), self._loaded, strict=False):
            position.load(saved)

    def regroup(self, states: list[dict[str, Any]]) -> None:
        """From a checkpoint of another number of workers: what `state` gave on each of them, in rank order."""
        if any(state["positions"] for state in states):
            raise UnsupportedError(
                f"the data were shared among {len(states)} workers, and this run has {self._world.size}; resume on "
                f"{len(states)} workers"
            )
