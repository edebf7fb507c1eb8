# SPDX-License-Identifier: Apache-2.0
"""A checkpoint: one directory, safetensors and JSON, checksummed, made in one piece or not at all.

::

    PATH/manifest.json           format, rule, size, and the sha256 sum of every other file
    PATH/global.safetensors      the global model; `safetensors.torch.load_file` gives a state dictionary
    PATH/rank-000.safetensors    rank 0's tensors (its model, optimizer, outer state, generators)
    PATH/rank-000.json           everything of rank 0 that is not a tensor

Files are written into `PATH.partial` and the directory is renamed when all workers are done, so that PATH is the old
checkpoint or the new one and never half of each. Formats do not notice flipped bytes; the sums do.
Another number of workers reads the files of all ranks (:mod:`paceline.regroup`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.transport import Transport
from paceline.tree import build, flatten

FORMAT = 1
MANIFEST = "manifest.json"
GLOBAL = "global.safetensors"
MARK = "being-written"
MANIFEST_LIMIT = 1 << 26
"""Bytes of a manifest, at most."""
_OURS = re.compile(r"being-written|manifest\.json|global\.safetensors|rank-\d{3,}\.(safetensors|json)")


def rank_names(rank: int) -> tuple[str, str]:
    """Names of the two files of a rank."""
    return f"rank-{rank:03d}.safetensors", f"rank-{rank:03d}.json"


def sha256(path: Path) -> str:
    """The file's sum, in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def save(
    path: Path, transport: Transport, about: dict[str, Any], state: dict[str, Any], model: dict[str, Tensor]
) -> None:
    """Write a checkpoint; every worker calls it at the same place of the program.

    Args:
        path: the directory to make or to replace; on one file system for the workers of a host.
        transport: the connection.
        about: what the manifest says besides the sums.
        state: this worker's own state.
        model: the global model, name -> tensor.
    """
    world = transport.world
    partial = path.with_name(path.name + ".partial")
    problem, sums = "", {}
    maker = _make_partial(path, partial, transport)
    try:
        sums = _write_rank(partial, world.rank, state)
        if maker:
            save_file({name: _own(tensor) for name, tensor in model.items()}, partial / GLOBAL)
            sums[GLOBAL] = sha256(partial / GLOBAL)
    except (OSError, CheckpointError, SafetensorError) as error:
        problem = str(error)
    everybody = all_well(transport, problem, "could not be written", sums)
    if maker:
        (partial / MARK).unlink()
        manifest = {"format": FORMAT, **about, "size": world.size, "files": _merge(everybody)}
        _write_durably(partial / MANIFEST, json.dumps(manifest, indent=1))
        _replace(partial, path)
    transport.barrier()


def _make_partial(path: Path, partial: Path, transport: Transport) -> bool:
    """Make the directory to write into, once on every file system; whether this worker did and has to finish it.

    Rank 0 leaves a mark, so that the first workers of other hosts see whether they share its disk.
    """
    world, mark = transport.world, secrets.token_hex(8)
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
    all_well(transport, problem, "could not be started")
    return maker


def _start_over(path: Path, partial: Path, mark: str) -> None:
    """An empty directory with a mark in it."""
    _remove(partial)
    _remove(path.with_name(path.name + ".old"), only_look=path.exists() is False)
    partial.mkdir(parents=True)
    (partial / MARK).write_text(mark, encoding="utf-8")


def _has(partial: Path, mark: str) -> bool:
    """Whether the directory is the one that rank 0 has marked."""
    file = partial / MARK
    return file.is_file() and file.read_text(encoding="utf-8") == mark


def _refuse_foreign(path: Path) -> None:
    """Never delete something that is not a checkpoint of ours."""
    if path.exists() and not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} exists and is no checkpoint; choose another path, or remove it yourself")


def _remove(directory: Path, only_look: bool = False) -> None:
    """Delete a directory that we made; refuse one that holds anything else."""
    if not directory.exists():
        return
    foreign = [file.name for file in directory.iterdir() if not _OURS.fullmatch(file.name)]
    if foreign:
        raise CheckpointError(
            f"{directory} is in the way and holds {foreign[0]!r}, which is no part of a checkpoint; move it elsewhere"
        )
    if not only_look:
        shutil.rmtree(directory)


def _write_rank(directory: Path, rank: int, state: dict[str, Any]) -> dict[str, str]:
    tensors: dict[str, Tensor] = {}
    rest = flatten(state, tensors, "")
    tensor_name, json_name = rank_names(rank)
    save_file({name: _own(tensor) for name, tensor in tensors.items()}, directory / tensor_name)
    _write_durably(directory / json_name, json.dumps(rest))
    return {name: sha256(directory / name) for name in (tensor_name, json_name)}


def _own(tensor: Tensor) -> Tensor:
    """Contiguous memory of its own on the host: safetensors refuses shared memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def all_well(transport: Transport, problem: str, what: str, sums: dict[str, str] | None = None) -> list[Any]:
    """Everybody's sums; the same error on all workers where one had a problem."""
    everybody = transport.gather_json({"problem": problem, "sums": sums or {}})
    world = transport.world
    said = [f"{world.name(rank)}: {one['problem']}" for rank, one in enumerate(everybody) if one["problem"]]
    if said:
        raise CheckpointError(world.sign(f"the checkpoint {what}: " + "; ".join(said)))
    return [one["sums"] for one in everybody]


def _merge(sums: list[dict[str, str]]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for one in reversed(sums):  # rank 0's global model is the one that is named, where hosts do not share a disk
        merged |= one
    return dict(sorted(merged.items()))


def _replace(partial: Path, path: Path) -> None:
    """Put the new directory in the place of the old one."""
    old = path.with_name(path.name + ".old")
    if path.exists():  # else `old` may be all there is, after a kill between the two renames
        _remove(old)
        path.rename(old)
    partial.rename(path)
    _remove(old)
    with contextlib.suppress(OSError):  # not every file system lets a directory be synced
        handle = os.open(path.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def look(path: Path, transport: Transport) -> dict[str, Any]:
    """The manifest of a checkpoint, made by any number of workers; or the same error on every worker."""
    problem, manifest, about = "", {}, ""
    try:
        manifest = read_manifest(path)
        about = hashlib.sha256(json.dumps([manifest["size"], sorted(manifest["files"].items())]).encode()).hexdigest()
    except CheckpointError as error:
        problem = str(error)
    told = all_well(transport, problem, f"{path} cannot be resumed", {"about": about})
    world = transport.world
    other = [rank for rank, one in enumerate(told) if one != told[0]]
    if other:
        raise CheckpointError(
            world.sign(
                f"{world.name(0)} and {world.names(other)} find different checkpoints at {path}; copy one of them to "
                "all hosts"
            )
        )
    return manifest


def load(manifest: dict[str, Any], path: Path, transport: Transport) -> dict[str, Any]:
    """This worker's state, where as many workers saved it; on every worker, or the same error on every worker."""
    problem, state = "", {}
    try:
        state = _read_rank(transport.world.rank, manifest)
    except CheckpointError as error:
        problem = str(error)
    all_well(transport, problem, f"{path} cannot be resumed")
    return state


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, with the `directory` in which its files are."""
    found = path if (path / MANIFEST).is_file() else path.with_name(path.name + ".old")  # killed between two renames
    file = found / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}")
    if file.is_symlink() or file.stat().st_size > MANIFEST_LIMIT:
        raise CheckpointError(f"{file} is no manifest of ours: it is a link, or has more than {MANIFEST_LIMIT} bytes")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        kind, size = manifest["format"], manifest["size"]
        files = manifest["files"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if kind != FORMAT:
        raise CheckpointError(f"{path} has format {kind}, and this paceline reads {FORMAT}")
    if not isinstance(files, dict):
        raise CheckpointError(f"{file} is damaged: its list of files is a {type(files).__name__}")
    foreign = [name for name in files if not _OURS.fullmatch(name)]
    if foreign:
        raise CheckpointError(f"{file} is damaged: it names {foreign[0]!r}, which is no file of a checkpoint")
    if not isinstance(size, int) or not 1 <= size <= len(files):
        raise CheckpointError(f"{file} is damaged: its number of workers is {size!r}, with {len(files)} files")
    manifest["directory"] = str(found)
    return dict(manifest)


def checked(manifest: dict[str, Any], name: str) -> Path:
    """Where a file of the checkpoint is; `CheckpointError` where it is missing or not what was written."""
    file = Path(manifest["directory"]) / name
    if file.is_symlink():
        raise CheckpointError(f"{file} is a link, and a checkpoint has files only: put a copy in its place")
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    if sha256(file) != manifest["files"].get(name):
        raise CheckpointError(
            f"{file} is damaged: its sha256 sum is not the one in {MANIFEST}; take an older checkpoint"
        )
    return file


def read_json(file: Path) -> Any:
    """What a JSON file of a checkpoint says; `CheckpointError` where it is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file of a checkpoint; `CheckpointError` where it is none."""
    try:
        return load_file(file)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from error


def _read_rank(rank: int, manifest: dict[str, Any]) -> dict[str, Any]:
    tensors, rest = (checked(manifest, name) for name in rank_names(rank))
    state: dict[str, Any] = build(read_json(rest), read_tensors(tensors))
    return state
