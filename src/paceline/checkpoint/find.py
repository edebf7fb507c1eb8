# SPDX-License-Identifier: Apache-2.0
"""Finds the checkpoint that `run.resume` is to load: a named one, or the newest step of a store or of the run's own."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from paceline.checkpoint.agreement import all_well
from paceline.checkpoint.files import MANIFEST, renamed
from paceline.checkpoint.loading import FoundCheckpoint, everywhere, load, look, newest, step_of
from paceline.checkpoint.steps import STEP, is_step
from paceline.checkpoint.store import StepStore, store_for
from paceline.checkpoint.urls import local_path, shown
from paceline.communication import Transport
from paceline.core import runtime
from paceline.errors import CheckpointError


class CheckpointFinder:
    """Finds the checkpoint to resume, the same on all workers; fetched files exist until the end of the `with`.

    Args:
        path: what the user named, or None for the run's own store.
        own: the run's own store, or None.
        transport: the connection.
        start: where to look if the run has no store, or no step in it; or None.
    """

    def __init__(
        self, path: str | Path | None, own: str | Path | None, transport: Transport, start: str | None = None
    ) -> None:
        self._path, self._transport, self._start = path, transport, start
        self._own: StepStore | None = store_for(own) if own is not None else None
        self._stores: list[StepStore] = [] if self._own is None else [self._own]

    def __enter__(self) -> CheckpointFinder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self._stores:
            store.close()

    def found(self) -> FoundCheckpoint:
        """The checkpoint to resume; without a manifest if the run's own store has no step.

        Raises:
            CheckpointError: there is none, or no intact one.
        """
        if self._path is None:
            checkpoint = self._newest(self._own) if self._own is not None else None
            if self._start is not None and (checkpoint is None or not checkpoint.manifest):
                return self._at(self._start)
            if checkpoint is None:
                raise CheckpointError(
                    "resume() was given no path, and attach no checkpoint=; give one of them, such as "
                    'attach(..., checkpoint="checkpoints")'
                )
            return checkpoint
        return self._at(self._path)

    def _at(self, place: str | Path) -> FoundCheckpoint:
        path = local_path(place)
        return self._named(path) if path is not None else self._named_by_url(str(place))

    def _named(self, path: Path) -> FoundCheckpoint:
        """A checkpoint, or the newest of a directory of steps."""
        store = store_for(path)
        disk = runtime.disk()
        single = disk.is_file(path / MANIFEST) or disk.is_folder(renamed(path)) or is_step(path)
        steps = not single and disk.is_folder(path) and bool(store.numbers())
        answers = self._transport.gather_json([single, steps])
        if not any(one[0] for one in answers) and any(one[1] for one in answers):
            return self._newest(store)
        manifest = look(path, self._transport)
        state = load(manifest, path, self._transport) if manifest["size"] == self._transport.world.size else None
        beside = store_for(path.parent)
        return FoundCheckpoint(name=str(path), manifest=manifest, state=state, frozen_file=beside.frozen)

    def _named_by_url(self, url: str) -> FoundCheckpoint:
        store = store_for(parent_and_number(url)[0] if is_step(url) else url)
        self._stores.append(store)
        if not is_step(url):
            checkpoint = self._newest(store)
            problem = "" if checkpoint.manifest else f"{shown(url)} has no step in it"
        else:
            checkpoint, problem = step_of(store, parent_and_number(url)[1], self._transport), ""
        all_well(self._transport, problem, f"{shown(url)} cannot be resumed")
        return checkpoint

    def _newest(self, store: StepStore) -> FoundCheckpoint:
        checkpoint = newest(store, self._transport)
        if checkpoint.damaged and not checkpoint.manifest:
            raise CheckpointError(
                self._transport.world.sign(
                    f"none of the {len(checkpoint.damaged)} steps of {store.shown} is whole: "
                    f"{'; '.join(checkpoint.damaged.values())}; put one of "
                    "them right, or move them away for a fresh start"
                )
            )
        return checkpoint

    def own_steps(self, checkpoint: FoundCheckpoint) -> tuple[int, list[int], list[int]]:
        """Of the run's own store: the step that was loaded (-1 if it is from elsewhere), damaged newer steps, and all
        steps; every worker calls it."""
        assert self._own is not None
        there = everywhere(self._own, self._transport)
        for number in there:
            if _same(self._own.name(number), checkpoint.name):
                return number, list(checkpoint.damaged), there
        return -1, [], there


def _same(one: str, other: str) -> bool:
    """Whether two names mean the same path or URL."""
    if not other:
        return False
    mine, its = local_path(one), local_path(other)
    if mine is None or its is None:
        return shown(one) == shown(other)
    return mine.resolve() == its.resolve()


def parent_and_number(url: str) -> tuple[str, int]:
    """The steps' folder and the step's number, of the URL of one step."""
    head, _, last = url.rstrip("/").rpartition("/")
    match = STEP.fullmatch(last)
    if match is None:
        raise CheckpointError(f"{shown(url)} is no step; name the folder of the steps, or one of them")
    return head, int(match[1])
