# SPDX-License-Identifier: Apache-2.0
"""Zero lines for the virtual workers of one process: each has its own patches of the libraries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.communication import virtual
from paceline.communication.virtual.transport import VirtualTransport
from paceline_plugins.zero.patches import Patches
from paceline_plugins.zero.program import zero_lines
from paceline_plugins.zero.rank_discovery import ZeroWorker


class Versions(contextlib.ExitStack):
    """Functions with a version for each virtual worker; other threads, and workers without one, call the original."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[tuple[int, str], dict[int, Any]] = {}  # (owner or registrar, name) -> rank -> function
        self._originals: dict[tuple[int, str], Any] = {}  # other code may have wrapped them since
        self._kept: list[Any] = []  # so that an id stays what it is

    def replaced(self, owner: Any, name: str) -> tuple[dict[int, Any], Any]:
        """The versions of an attribute by rank, and the original for ranks without one."""
        versions = self._of.get((id(owner), name))
        if versions is None:
            original = self._originals[id(owner), name] = getattr(owner, name)
            versions = self._new(owner, name)
            ours = _by_rank(versions, original)
            setattr(owner, name, ours)
            self.callback(_put_back, owner, name, ours, original)
        return versions, self._originals[id(owner), name]

    def hooks(self, register: Callable[[Callable[..., Any]], Any]) -> dict[int, Any]:
        """The hooks of torch's `register`, by rank."""
        versions = self._of.get((id(register), ""))
        if versions is None:
            versions = self._new(register, "")
            self.callback(register(_by_rank(versions, lambda *args, **kwargs: None)).remove)
        return versions

    def _new(self, owner: Any, name: str) -> dict[int, Any]:
        self._kept.append(owner)
        return self._of.setdefault((id(owner), name), {})


def _by_rank(versions: dict[int, Any], original: Any) -> Callable[..., Any]:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        transport = virtual.current()
        function = original if transport is None else versions.get(transport.world.rank, original)
        return function(*args, **kwargs)

    return chosen


def _put_back(owner: Any, name: str, ours: Any, original: Any) -> None:
    """Restore the original, unless other code has replaced ours."""
    if getattr(owner, name) is ours:
        setattr(owner, name, original)


class OwnPatches(Patches):
    """The patches of one virtual worker.

    Args:
        versions: those of all workers.
        rank: this worker's.
    """

    def __init__(self, versions: Versions, rank: int) -> None:
        super().__init__()
        self._versions, self._rank = versions, rank

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """As `Patches.replace`, for this worker only."""
        versions, original = self._versions.replaced(owner, name)
        before = versions.get(self._rank)
        versions[self._rank] = make(original if before is None else before)
        self.callback(self._put_back, versions, before)

    def hook(self, register: Callable[[Callable[..., Any]], Any], function: Callable[..., Any]) -> None:
        """As `Patches.hook`, for this worker only."""
        hooks = self._versions.hooks(register)
        hooks[self._rank] = function
        self.callback(hooks.pop, self._rank)

    def _put_back(self, versions: dict[int, Any], before: Any) -> None:
        if before is None:
            del versions[self._rank]
        else:
            versions[self._rank] = before


class VirtualZeroLines:
    """Contexts around the scripts of this process's virtual workers.

    Args:
        script: the program.
        logs: the run's log directory.
        random_data: whether the program draws its samples at random.
    """

    def __init__(self, script: Path, logs: Path | None, random_data: bool) -> None:
        self._script, self._logs, self._random_data = script, logs, random_data
        self._versions, self._began = Versions(), time.time()

    def __enter__(self) -> VirtualZeroLines:
        return self

    def __exit__(self, *failure: object) -> None:
        self._versions.close()

    @contextlib.contextmanager
    def worker(self, transport: VirtualTransport) -> Iterator[None]:
        """Context around the script of the worker in this thread."""
        world = transport.world
        worker = ZeroWorker(world.rank, world.size, 0, self._logs, self._random_data)
        with OwnPatches(self._versions, world.rank) as patches, zero_lines(self._script, worker, patches, self._began):
            yield
