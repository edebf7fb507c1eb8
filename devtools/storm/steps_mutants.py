# SPDX-License-Identifier: Apache-2.0
"""Bugs that are planted into how checkpoint steps are written, kept, found and claimed; a storm has to find each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from devtools.storm.mutants import Plant, _instead, _nothing
from devtools.world.process import _ProcessDisk

from paceline.checkpoint import files, loading, saving, store
from paceline.checkpoint.claim import DirectoryClaim
from paceline.checkpoint.store import DirectoryStore
from paceline.core import runtime
from paceline.errors import CheckpointError


def _own_newest() -> Any:
    def newest(steps: Any, transport: Any) -> Any:
        for number in reversed(steps.numbers()):
            with contextlib.suppress(CheckpointError, OSError):
                manifest, state = loading._read(partial(steps.fetch, number), transport.world, step=True)
                return loading.FoundCheckpoint(number, steps.name(number), manifest, state)
        return loading.FoundCheckpoint()

    return _instead(loading, "newest", newest)


def _first_manifest() -> Any:
    """Rank 0's choice, whatever the others say of it."""
    fill = loading._fill

    def of_rank_0(checkpoint: Any, fetch: Any, transport: Any) -> str:
        def first(value: Any) -> list[Any]:
            answers: list[Any] = transport.gather_json(value)
            return [answers[0] for _ in answers]

        rank_0: Any = SimpleNamespace(world=transport.world, gather_json=first)
        return str(fill(checkpoint, fetch, rank_0))

    return _instead(loading, "_fill", of_rank_0)


def _looks_at_no_sums() -> Any:
    return _instead(files, "checked", lambda manifest, name: Path(manifest["directory"]) / name)


def _takes_the_newest_without_a_look() -> Any:
    def newest(steps: Any, transport: Any) -> Any:
        there = loading.everywhere(steps, transport)
        if not there:
            return loading.FoundCheckpoint()
        return loading.step_of(steps, there[-1], transport)

    return _instead(loading, "newest", newest)


def _does_not_sync_the_manifest() -> Any:
    return _instead(saving, "write_text", lambda path, text: runtime.disk().write(path, text.encode()))


@contextlib.contextmanager
def _does_not_sync_after_the_rename() -> Iterator[None]:
    replace, sync = saving._replace, _ProcessDisk.sync_folder

    def without(partial: Path, path: Path) -> None:
        with _instead(_ProcessDisk, "sync_folder", lambda disk, at: None if at == path.parent else sync(disk, at)):
            replace(partial, path)

    with _instead(saving, "_replace", without):
        yield


def _deletes_before_it_writes() -> Any:
    write = DirectoryStore.write

    def first(self: Any, number: int, transport: Any, *rest: Any) -> Any:
        if transport.world.local_rank == 0:
            for old in self.numbers()[: 1 - self.keeps if self.keeps > 1 else None]:
                with contextlib.suppress(OSError, CheckpointError):
                    saving.remove(self.path(old))
        return write(self, number, transport, *rest)

    with_keep = DirectoryStore.tidy

    def tidy(self: Any, keep: int) -> None:
        self.keeps = keep
        with_keep(self, keep)

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        DirectoryStore.keeps = 1 << 30  # type: ignore[attr-defined]
        try:
            with _instead(DirectoryStore, "write", first), _instead(DirectoryStore, "tidy", tidy):
                yield
        finally:
            del DirectoryStore.keeps  # type: ignore[attr-defined]

    return planted()


def _keeps_one_less() -> Any:
    tidy = DirectoryStore.tidy
    return _instead(DirectoryStore, "tidy", lambda self, keep: tidy(self, max(1, keep - 1)))


def _removes_nothing_unfinished() -> Any:
    kind = store._kind
    return _instead(store, "_kind", lambda entry: kind(entry).replace("partial", ""))


def _renames_before_all_have_the_manifest() -> Any:
    """As if each host had the only disk."""
    make = saving._make_partial

    def alone(*given: Any) -> tuple[bool, int]:
        return make(*given)[0], 1

    return _instead(saving, "_make_partial", alone)


def _does_not_hear_of_problems() -> Any:
    well = saving.all_well  # type: ignore[attr-defined]
    return _instead(saving, "all_well", lambda transport, problem, *rest: well(transport, "", *rest))


STEPS_MUTANTS: dict[str, Plant] = {
    "each worker resumes from its own newest step": _own_newest,
    "rank 0 alone says whether a step is whole": _first_manifest,
    "sums of a step's files are not looked at": _looks_at_no_sums,
    "a damaged step ends the search for a whole one": _takes_the_newest_without_a_look,
    "files of a step are not synced": lambda: _instead(_ProcessDisk, "sync", _nothing),
    "folders of steps are not synced": lambda: _instead(_ProcessDisk, "sync_folder", _nothing),
    "a step's manifest is not synced": _does_not_sync_the_manifest,
    "the folder is not synced after a step's rename": _does_not_sync_after_the_rename,
    "an old step is deleted before the new one is safe": _deletes_before_it_writes,
    "one step too many is deleted": _keeps_one_less,
    "unfinished steps are never removed": _removes_nothing_unfinished,
    "hosts name a step before all have its manifest": _renames_before_all_have_the_manifest,
    "problems of other workers are not heard": _does_not_hear_of_problems,
    "two runs may use one place": lambda: _instead(DirectoryClaim, "take", _nothing),
}
"""By what is wrong."""
