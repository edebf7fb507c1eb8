# SPDX-License-Identifier: Apache-2.0
"""Checks that all workers have the same training data; else one worker could train on another's validation samples.

Workers compare the states of the random generators, the number of samples, the indices of every `Subset` and sampler,
and, before the first step, a few thousand values from the data sets. File names are compared without their folders,
which may differ between hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset

from paceline.run.run import Run
from paceline_plugins.zero import refusals, seeds
from paceline_plugins.zero.seeds import Streams

VALUES = 1024
"""How many values of a list or an array are compared; of index arrays, all are."""
MOST_INDICES = 20_000_000
DEEP = 5
GENERATORS = ("torch", "NumPy", "Python")


class Agreement:
    """Wraps passes over training data: random draws agree before a pass, and differ by worker inside it.

    Args:
        streams: this worker's random streams.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._asked: list[Any] = []  # loaders, so that an id stays what it is
        self._began = False

    @contextlib.contextmanager
    def around(self, run: Run, loader: DataLoader[Any], where: str) -> Iterator[Streams]:
        """Context of a pass over `loader` that begins at `where`."""
        if not self._streams.apart:
            self.check(run, loader, where)
        self._streams.enter()
        try:
            yield self._streams
        finally:
            self._streams.leave()

    def check(self, run: Run, loader: DataLoader[Any], where: str) -> None:
        """Compare the workers' data before a training pass; every worker calls it, or none.

        Raises:
            Refusal: the workers differ; raised on every worker.
        """
        if run.world.size == 1 or any(one is loader for one in self._asked):
            return
        self._asked = [*self._asked[-7:], loader]
        first, self._began = not self._began, True
        mine = [fingerprint(loader, contents=first), _length(loader), list(seeds.positions()) if first else []]
        all_of_them = run.messages.gather(mine)
        for rank, other in enumerate(all_of_them):
            if other[:2] != all_of_them[0][:2]:
                raise refusals.other_data(where, _told(all_of_them[0]), rank, _told(other))
        for rank, other in enumerate(all_of_them):
            if other[2] != all_of_them[0][2]:
                differing = [name for name, a, b in zip(GENERATORS, other[2], all_of_them[0][2], strict=True) if a != b]
                raise refusals.other_seeds(where, " and ".join(differing), rank)


def fingerprint(loader: DataLoader[Any], contents: bool = True) -> str:
    """A 16-digit hash of a loader's data.

    Args:
        loader: the program's.
        contents: also hash values from the data sets; else indices and lengths only.
    """
    walk = _Walk(contents)
    walk.add(loader.dataset, DEEP)
    walk.add(getattr(loader, "batch_sampler", None), DEEP)
    walk.add(getattr(loader, "sampler", None), DEEP)
    return walk.digest.hexdigest()


class _Walk:
    """Hashes the attributes of a data set or a sampler, recursively."""

    def __init__(self, contents: bool) -> None:
        self.digest = hashlib.blake2b(digest_size=8)
        self._contents, self._seen = contents, set[int]()

    def say(self, *reporter: object) -> None:
        """Add these to the hash."""
        self.digest.update(repr(reporter).encode())

    def add(self, value: Any, deep: int) -> None:
        """Add a value to the hash; values of other types are skipped."""
        if isinstance(value, (Tensor, np.ndarray)):
            self._array(value)
        elif isinstance(value, (list, tuple, range)):
            self._list(value, deep)
        elif isinstance(value, (str, os.PathLike)):
            self.say(os.path.basename(os.fspath(value)))
        elif isinstance(value, (bool, int, float, bytes)):
            self.say(value[:VALUES] if isinstance(value, bytes) else value)
        elif isinstance(value, (Dataset, Sampler)) or (deep and _is_plain(value)):
            self._thing(value, deep)

    def _thing(self, thing: Any, deep: int) -> None:
        if id(thing) in self._seen or deep < 0:
            return
        self._seen.add(id(thing))
        self.say(type(thing).__name__)
        for name, value in sorted(getattr(thing, "__dict__", {}).items()):
            if isinstance(value, (Dataset, Sampler)):
                self._thing(value, deep - 1)
            elif isinstance(value, (list, tuple, range, Tensor, np.ndarray)) and (
                self._contents or isinstance(thing, (Subset, ConcatDataset, Sampler))
            ):
                self.say(name)
                self.add(value, deep - 1)

    def _array(self, values: Tensor | np.ndarray[Any, Any]) -> None:
        self.say("array", tuple(values.shape), str(values.dtype).split(".")[-1])
        if isinstance(values, Tensor) and (values.layout != torch.strided or values.device.type == "meta"):
            return
        whole = _are_indices(values)
        flat = values.reshape(-1)
        part = flat if whole else flat[:: max(1, len(flat) // VALUES)]
        if isinstance(part, Tensor):
            part = part.detach().cpu().contiguous().view(torch.uint8).numpy()
        elif part.dtype == object:
            self._list(part.tolist(), 1)
            return
        self.digest.update(np.ascontiguousarray(part).tobytes())

    def _list(self, values: Sequence[Any], deep: int) -> None:
        self.say("list", len(values))
        if not len(values) or deep < 0:
            return
        if isinstance(values[0], (int, np.integer)) and len(values) <= MOST_INDICES:
            try:
                self.digest.update(np.fromiter(values, dtype=np.int64, count=len(values)).tobytes())
                return
            except (TypeError, ValueError, OverflowError):
                pass  # not all of them are numbers
        for value in values[:: max(1, len(values) // VALUES)]:
            self.add(value, deep - 1)


def _are_indices(values: Tensor | np.ndarray[Any, Any]) -> bool:
    if values.ndim != 1 or values.shape[0] > MOST_INDICES:
        return False
    return not values.dtype.is_floating_point if isinstance(values, Tensor) else values.dtype.kind in "iub"


def _is_plain(value: Any) -> bool:
    """Whether it is an object of the program that may hold a sampler's indices."""
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value)


def _length(loader: DataLoader[Any]) -> int:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _told(one: list[Any]) -> str:
    return f"{one[1]:,} samples with sum {one[0]}" if one[1] >= 0 else f"a stream with sum {one[0]}"
