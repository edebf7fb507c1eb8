# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint into a directory, atomically.

Workers write into `PATH.partial`; when all are done, it gets its manifest and is renamed. So PATH is the old checkpoint
or the new one. Where hosts have file systems of their own, all have the manifest before one renames, and after a kill
between the renames a `PATH.partial` with a manifest counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from paceline.checkpoint.files import (
    FROZEN,
    MANIFEST,
    MARK,
    OURS,
    Content,
    Working,
    all_well,
    manifest_text,
    renamed,
    without_beats,
    write_missing,
    write_model,
    write_rank,
    write_text,
)
from paceline.communication import Transport
from paceline.core import runtime
from paceline.core.state_tree import flatten
from paceline.errors import CheckpointError

PROBLEMS = (OSError, CheckpointError, SafetensorError, MemoryError)


def save(
    path: Path, transport: Transport, about: dict[str, Any], state: dict[str, Any], model: dict[str, Tensor]
) -> None:
    """Write a checkpoint of this worker's `state` and the global `model`; every worker calls it at the same place.

    Args:
        path: the directory to create or replace; on one file system for the workers of a host.
        about: what the manifest says besides the sums.
    """

    def content() -> Content:
        tensors: dict[str, Tensor] = {}
        return Content(flatten(state, tensors, ""), tensors, model)

    write(path, transport, about, content, without_beats)


def write(
    path: Path, transport: Transport, about: dict[str, Any], content: Callable[[], Content], working: Working
) -> tuple[int, bool]:
    """As `save`, of what `content` returns.

    Returns:
        The bytes that this worker has written, and whether it is the first worker on its file system.

    Raises:
        CheckpointError: it could not be written, on every worker alike; an older checkpoint at `path` stays.
    """
    world = transport.world
    partial = path.with_name(path.name + ".partial")
    problem, sums, nbytes, sealed = "", dict[str, str](), 0, False
    maker, makers = _make_partial(path, partial, transport)
    frozen: dict[str, tuple[str, Tensor]] = {}

    def files() -> None:
        nonlocal nbytes
        brought = content()
        frozen.update(brought.frozen)
        sums.update(write_rank(partial, world.rank, brought))
        if maker:
            sums.update(write_model(partial, brought.model))
            rest()
        nbytes += sum(runtime.disk().size(partial / name) for name in sums)

    def rest() -> None:
        nonlocal nbytes
        nbytes += write_missing(path.parent / FROZEN, frozen)

    def carry_out(action: Callable[[], None]) -> None:
        nonlocal problem
        problem = _tried(action)

    try:
        working(transport, lambda: carry_out(files))
        everybody = all_well(transport, problem, "could not be written", sums | named(frozen))
        if keys := named_by(everybody):  # a tensor that has changed on the makers only, none of them has written
            working(transport, lambda: carry_out(rest))
            all_well(transport, problem, "could not be written")
        if maker:
            text = manifest_text(about, world.size, merged(everybody), keys)
            problem = _tried(lambda: _seal(partial, text, makers > 1))
        if makers > 1:  # no file system has the new checkpoint before all are sure to have it
            all_well(transport, problem, "could not be finished")
            sealed = True
        if maker and not problem:
            problem = _tried(lambda: _replace(partial, path))
        all_well(transport, problem, "could not be finished")
    except CheckpointError:
        if maker and not sealed:
            with contextlib.suppress(OSError):
                runtime.disk().remove_folder(partial)  # it is ours, and the disk may be full
        raise
    return nbytes, maker


def _tried(action: Callable[[], None]) -> str:
    """An error message, or ""."""
    try:
        action()
    except PROBLEMS as error:
        return str(error) or type(error).__name__
    return ""


def _seal(partial: Path, manifest: str, several: bool) -> None:
    """Write the manifest: from now on the directory is a checkpoint, under a name that is not its own yet.

    Where `several` file systems get one, this one is read after a kill between their renames.
    """
    disk = runtime.disk()
    disk.remove(partial / MARK)
    write_text(partial / MANIFEST, manifest)
    disk.sync_folder(partial)
    if several:
        disk.sync_folder(partial.parent)


def _make_partial(path: Path, partial: Path, transport: Transport) -> tuple[bool, int]:
    """Create the directory to write into, once on every file system; whether this worker did, and has to finish it, and
    how many did.

    Rank 0 writes a mark, by which the first workers of other hosts see whether they share its disk.
    """
    world, mark = transport.world, runtime.token_hex(8)
    maker, problem = world.rank == 0, ""
    try:
        _refuse_foreign(path)
        if maker:
            _start_over(path, partial, mark)
    except (OSError, CheckpointError) as error:
        problem = str(error)
    mark = all_well(transport, problem, "could not be started", {"mark": mark})[0]["mark"]
    try:
        if world.local_rank == 0 and not maker and not _has(partial, mark):
            maker = True
            _start_over(path, partial, mark)
    except (OSError, CheckpointError) as error:
        problem = str(error)
    everybody = all_well(transport, problem, "could not be started", {"maker": "yes" if maker else ""})
    return maker, sum(one["maker"] == "yes" for one in everybody)


def _start_over(path: Path, partial: Path, mark: str) -> None:
    """Create an empty directory with a mark in it."""
    remove(partial)
    disk = runtime.disk()
    if disk.exists(path):
        _remove_old(path)
    else:
        _refuse_others(renamed(path))
    disk.make_folder(partial)
    disk.write(partial / MARK, mark.encode())


def _has(partial: Path, mark: str) -> bool:
    """Whether the directory is the one that rank 0 has marked."""
    file, disk = partial / MARK, runtime.disk()
    return disk.is_file(file) and disk.read(file) == mark.encode()


def _refuse_foreign(path: Path) -> None:
    """Raise for anything but a checkpoint, which must not be deleted."""
    disk = runtime.disk()
    if disk.exists(path) and not disk.is_file(path / MANIFEST):
        raise CheckpointError(f"{path} exists and is no checkpoint; choose another path, or remove it yourself")


def remove(directory: Path) -> None:
    """Delete a checkpoint's directory; raise if it holds anything else."""
    disk = runtime.disk()
    if disk.exists(directory):
        _refuse_others(directory)
        disk.remove_folder(directory)


def _refuse_others(directory: Path) -> None:
    """Raise if a directory that is in the way holds anything but a checkpoint's files."""
    disk = runtime.disk()
    foreign = [name for name in disk.names(directory) if not OURS.fullmatch(name)] if disk.exists(directory) else []
    if foreign:
        raise CheckpointError(
            f"{directory} is in the way and holds {foreign[0]!r}, which is no part of a checkpoint; move it elsewhere"
        )


def named(frozen: Iterable[str]) -> dict[str, str]:
    """The keys of frozen tensors, beside the sums of files."""
    return {f"{FROZEN}/{key}": "" for key in frozen}


def named_by(sums: list[dict[str, str]]) -> list[str]:
    """The keys of frozen tensors that any worker names."""
    return sorted({name.removeprefix(f"{FROZEN}/") for one in sums for name in one if name.startswith(f"{FROZEN}/")})


def merged(sums: list[dict[str, str]]) -> dict[str, str]:
    """All workers' sums of files; for a file that several wrote, the lowest rank's."""
    all_sums: dict[str, str] = {}
    for one in reversed(sums):  # where hosts do not share a disk, the manifest names rank 0's global model
        all_sums |= {name: value for name, value in one.items() if value}
    return all_sums


def _replace(partial: Path, path: Path) -> None:
    """Replace the old directory by the new one."""
    old, disk = renamed(path), runtime.disk()
    if disk.exists(path):  # else `old` may be all there is, after a kill between the two renames
        _remove_old(path)
        disk.replace(path, old)
    disk.replace(partial, path)
    disk.sync_folder(path.parent)
    remove(old)


def _remove_old(path: Path) -> None:
    """Remove what was renamed to make room for `path`, once no power failure can give it its name back."""
    old, disk = renamed(path), runtime.disk()
    if disk.exists(old):
        disk.sync_folder(path.parent)
        remove(old)
