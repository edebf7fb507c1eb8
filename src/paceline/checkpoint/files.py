# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint: names, checksums, writing and reading; and how workers agree on them.

The file formats do not detect flipped bytes; the sums do. File names are fixed here and never taken from a file, so
that nothing outside of the checkpoint's directory is read, whatever a manifest says.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.communication import Transport
from paceline.core import runtime
from paceline.core.bits import key, memory
from paceline.core.state_tree import build
from paceline.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
GLOBAL = "global.safetensors"
MARK = "being-written"
FROZEN = "frozen"
"""The folder of frozen tensors, beside the steps that name them."""
MANIFEST_LIMIT = 1 << 26
"""Largest size of a manifest, bytes."""
STEP_OR_OLD = re.compile(r"step-(\d{9,18})(\.old)?")
OURS = re.compile(r"being-written|manifest\.json|global\.safetensors|rank-\d{3,}\.(safetensors|json)")


@dataclass
class Content:
    """One worker's part of a checkpoint: copies in host memory, unless training pauses while it is written."""

    rest: Any  # its state without tensors, as JSON
    tensors: dict[str, Tensor]  # those of its state
    model: dict[str, Tensor]  # the global model; empty if this worker does not write it
    frozen: dict[str, tuple[str, Tensor]] = field(default_factory=dict)  # key -> (name, values), not copied


def rank_names(rank: int) -> tuple[str, str]:
    """Names of the two files of a rank."""
    return f"rank-{rank:03d}.safetensors", f"rank-{rank:03d}.json"


def frozen_name(key: str) -> str:
    """File name of a frozen tensor's values."""
    return f"{key}.safetensors"


def all_names(size: int) -> list[str]:
    """Names of all files that have sums, in a checkpoint of `size` workers."""
    return [GLOBAL, *(name for rank in range(size) for name in rank_names(rank))]


def sha256(path: Path) -> str:
    """The file's sum, in hexadecimal."""
    with runtime.disk().open(path) as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


# -- writing -----------------------------------------------------------------------------------------------------------


def write_rank(directory: Path, rank: int, content: Content) -> dict[str, str]:
    """Write the two files of a rank; name -> sum."""
    tensor_name, json_name = rank_names(rank)
    rest = json.dumps(content.rest)
    write_text(directory / json_name, rest)
    digest = write_tensors(directory / tensor_name, content.tensors)
    return {tensor_name: digest, json_name: hashlib.sha256(rest.encode()).hexdigest()}


def write_model(directory: Path, model: dict[str, Tensor]) -> dict[str, str]:
    """Write the global model; name -> sum."""
    return {GLOBAL: write_tensors(directory / GLOBAL, model)}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a file and sync it to disk; its sum."""
    disk, tensors = runtime.disk(), _each_alone(tensors)
    with disk.writing(path) as file:
        save_file(tensors, file)
        digest = _sum_of(file, tensors)
    disk.sync(path)
    return digest


def _each_alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the host, contiguous, and none in another's memory, which safetensors refuses; else no copies."""
    alone: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        if here.untyped_storage().data_ptr() in taken:
            here = here.clone(memory_format=torch.contiguous_format)
        taken.add(here.untyped_storage().data_ptr())
        alone[name] = here
    return alone


def _sum_of(file: Path, tensors: dict[str, Tensor]) -> str:
    """The sum that a file of these tensors has to have: of its header, which is checked, and of what is in memory.

    The sum of the file itself would be right for a bit that has flipped since, too.
    """
    with file.open("rb") as written:
        head = written.read(8)
        header = written.read(int.from_bytes(head, "little"))
    digest, at = hashlib.sha256(head + header), 0
    try:
        places = {name: about for name, about in json.loads(header).items() if name != "__metadata__"}
        if places.keys() != tensors.keys():
            raise ValueError(f"it names {sorted(places)}")
        for name, about in sorted(places.items(), key=lambda one: (one[1]["data_offsets"], one[0])):
            tensor = tensors[name].detach()
            end = at + tensor.numel() * tensor.element_size()
            if about["data_offsets"] != [at, end] or about["shape"] != list(tensor.shape):
                raise ValueError(f"it says {about} of {name}")
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
            at = end
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: its header is another one than was written: {error}") from error
    return digest.hexdigest()


def manifest_text(about: dict[str, Any], size: int, sums: dict[str, str], frozen: Iterable[str] = ()) -> str:
    """The manifest, with a sum of its own; `frozen`: the keys that the step names."""
    entries = {"format": FORMAT, **about, "size": size, "files": dict(sorted(sums.items()))}
    if frozen:
        entries["frozen"] = sorted(frozen)
    return json.dumps({**entries, "sum": own_sum(entries)}, indent=1)


def own_sum(manifest: dict[str, Any]) -> str:
    """The sum of a manifest's other fields."""
    entries = {name: value for name, value in manifest.items() if name != "sum"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def renamed(path: Path) -> Path:
    """Where a checkpoint's directory is while a new one takes its place."""
    return path.with_name(path.name + ".old")


def write_text(path: Path, text: str) -> None:
    """Write a file and sync it to disk."""
    disk = runtime.disk()
    disk.write(path, text.encode())
    disk.sync(path)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, with the `directory` of its files."""
    disk = runtime.disk()
    places = [path, renamed(path), path.with_name(path.name + ".partial")]
    place = next((one for one in places if disk.is_file(one / MANIFEST)), path)  # others: killed between two renames
    file = place / MANIFEST
    if not disk.is_file(file):
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}; give the directory that run.save wrote")
    if disk.is_link(place) and STEP_OR_OLD.fullmatch(place.name):
        raise CheckpointError(f"{place} is a link, and a step is a directory of its own: put a copy in its place")
    if disk.is_link(file) or disk.size(file) > MANIFEST_LIMIT:
        raise CheckpointError(f"{file} is no manifest of ours: it is a link, or has more than {MANIFEST_LIMIT} bytes")
    try:
        manifest = json.loads(disk.read(file).decode())
        kind, size = manifest["format"], manifest["size"]
        files, _ = manifest["files"], manifest["rule"] if kind == FORMAT else ""
    except OSError as error:  # such as a failing disk
        raise CheckpointError(f"{file} cannot be read: {error}; take an older checkpoint") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    if kind != FORMAT:
        raise CheckpointError(f"{path} has format {kind}, and this paceline reads {FORMAT}")
    if not isinstance(files, dict):
        raise CheckpointError(f"{file} is damaged: its list of files is a {type(files).__name__}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise CheckpointError(f"{file} is damaged: its number of workers is {size!r}")
    foreign = [name for name in files if not OURS.fullmatch(name)]
    if foreign:
        raise CheckpointError(f"{file} is damaged: it names {foreign[0]!r}, which is no file of a checkpoint")
    if len(files) != 2 * size + 1 or set(files) != set(all_names(size)):
        raise CheckpointError(f"{file} is damaged: it names {len(files)} files, which are not those of {size} workers")
    if "sum" in manifest and manifest["sum"] != own_sum(manifest):  # the first versions wrote none
        raise CheckpointError(f"{file} is damaged: its own sum is another one; take an older checkpoint")
    manifest["directory"] = str(place)
    return dict(manifest)


def checked(manifest: dict[str, Any], name: str) -> Path:
    """The path of a checkpoint's file; `CheckpointError` if it is missing or its sum differs."""
    file = Path(manifest["directory"]) / name
    disk = runtime.disk()
    if disk.is_link(file):
        raise CheckpointError(f"{file} is a link, and a checkpoint has files only: put a copy in its place")
    if not disk.is_file(file):
        raise CheckpointError(f"{file} is missing")
    try:
        digest = sha256(file)
    except OSError as error:  # such as a failing disk
        raise CheckpointError(f"{file} cannot be read: {error}; take an older checkpoint") from error
    if digest != manifest["files"].get(name):
        raise CheckpointError(
            f"{file} is damaged: its sha256 sum is not the one in {MANIFEST}; take an older checkpoint"
        )
    return file


def read_json(file: Path) -> Any:
    """The content of a JSON file of a checkpoint; `CheckpointError` if it is no JSON."""
    try:
        return json.loads(runtime.disk().read(file).decode())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file of a checkpoint; `CheckpointError` if it is none."""
    try:
        with runtime.disk().reading(file) as there:
            return load_file(there)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from error


def read_rank(manifest: dict[str, Any], rank: int) -> dict[str, Any]:
    """The state that a rank saved; `CheckpointError` if a file is damaged or holds something else."""
    tensors, rest = (checked(manifest, name) for name in rank_names(rank))
    try:
        state: dict[str, Any] = build(read_json(rest), read_tensors(tensors))
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{tensors} or {rest.name} holds something else than a checkpoint does: {type(error).__name__}: {error}"
        ) from error
    return state


def check_files(manifest: dict[str, Any], names: Iterable[str]) -> None:
    """Raise `CheckpointError` for the first of these files that is damaged or of another format."""
    for name in names:
        file = checked(manifest, name)
        try:
            if name.endswith(".json"):
                read_json(file)
            else:
                with runtime.disk().reading(file) as there, safe_open(there, framework="pt") as tensors:
                    tensors.keys()
        except CheckpointError:
            raise
        except (SafetensorError, ValueError, OSError) as error:
            raise CheckpointError(f"{file} holds something else than its name says: {error}") from error


Working = Callable[[Transport, Callable[[], None]], None]
"""Does this worker's part of the work; every worker calls it at the same place."""


def all_well(transport: Transport, problem: str, what: str, sums: dict[str, str] | None = None) -> list[Any]:
    """All workers' sums; where one of them had a problem, the same error on every worker."""
    everybody = transport.gather_json({"problem": problem, "sums": sums or {}})
    world = transport.world
    problems = [f"{world.name(rank)}: {one['problem']}" for rank, one in enumerate(everybody) if one["problem"]]
    if problems:
        raise CheckpointError(world.sign(f"the checkpoint {what}: " + "; ".join(problems)))
    return [one["sums"] for one in everybody]


def without_beats(transport: Transport, work: Callable[[], None]) -> None:
    """Work in this thread; other workers wait for it at most until the connection's deadline."""
    work()


def with_beats(beat_s: float) -> Working:
    """Work that may outlast the connection's deadline: workers exchange a message every `beat_s` seconds meanwhile."""

    def working(transport: Transport, work: Callable[[], None]) -> None:
        over = runtime.Event()

        def body() -> None:
            try:
                work()
            finally:
                over.set()

        runtime.thread(body, "paceline-checkpoint-files").start()
        while True:
            mine = over.wait(beat_s)
            if all(transport.gather_json(mine)):
                return

    return working


STEP = re.compile(r"step-(\d{9,18})")


Needed = Callable[[dict[str, Any]], Iterable[str]]
"""Manifest -> names of the files to fetch."""


def step_name(number: int) -> str:
    """The name of a step."""
    return f"step-{number:09d}"


def is_step(place: str | Path) -> bool:
    """Whether the name is that of one step."""
    return STEP.fullmatch(str(place).rstrip("/").rpartition("/")[2]) is not None


# -- frozen tensors ----------------------------------------------------------------------------------------------------
#
# Their values are written once, and a step names them by key:
#
#     DIR/frozen/KEY.safetensors      the values of one frozen tensor, for all steps in DIR that name its key
#     PATH/global.safetensors         has them, of a single checkpoint
#
# A key tells the values (`paceline.core.bits.key`). Where a resume finds the same key in the program, which mostly
# loads the same base again, it reads nothing.

Read = Callable[[str, str], Tensor]
"""(name, key) -> the values; CheckpointError if they are nowhere."""


def without(model: dict[str, Tensor], frozen: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A model without these tensors, and without second names of the same memory: name -> the first one."""
    first: dict[tuple[object, ...], str] = {}
    tied = {}
    for name, tensor in model.items():
        if (other := first.setdefault(memory(tensor), name)) != name:
            tied[name] = other
    left = {*frozen, *tied}
    return {name: tensor for name, tensor in model.items() if name not in left}, tied


def complete(model: dict[str, Tensor], saved: dict[str, Any], own: dict[str, Tensor], read: Read) -> None:
    """Put what `without` has taken out of `model` into it again, from this worker's `own`, or by `read`.

    `saved`, the state beside it, has the keys of the "frozen" tensors and the first names of "tied" ones.
    """
    for name, wanted in (saved.get("frozen") or {}).items():
        if name not in model:
            same = name in own and key(name, own[name]) == wanted
            model[name] = own[name] if same else read(name, wanted)
    model |= {name: model[first] for name, first in (saved.get("tied") or {}).items() if name not in model}


def reader(manifest: dict[str, Any], file_of: Callable[[str], Path]) -> Read:
    """Reads frozen tensors of the checkpoint with this manifest; `file_of` gives the file of a key."""

    def read(name: str, wanted: str) -> Tensor:
        try:
            if wanted in manifest.get("frozen", ()):
                tensor = read_tensors(file_of(wanted))["values"]
            else:
                tensor = read_tensors(checked(manifest, GLOBAL))[name]
            if key(name, tensor) != wanted:
                raise CheckpointError("what was saved is damaged")
        except (CheckpointError, KeyError) as error:
            raise CheckpointError(
                f"{name} is frozen, and has other values here than when the checkpoint was written, which cannot be "
                f"read ({error}): load the same base as then, or put {FROZEN}/{frozen_name(wanted)} back"
            ) from error
        return tensor

    return read


def write_missing(folder: Path, frozen: dict[str, tuple[str, Tensor]]) -> int:
    """Write the frozen tensors, key -> (name, values), that are not in `folder` yet; the bytes written."""
    disk, nbytes = runtime.disk(), 0
    for wanted, (name, tensor) in frozen.items():
        file = folder / frozen_name(wanted)
        if disk.is_file(file):
            continue
        disk.make_folder(folder)
        partial = file.with_name(f"{file.name}.{runtime.token_hex(4)}.partial")
        write_tensors(partial, {"values": tensor})
        if key(name, tensor) != wanted:
            disk.remove(partial)
            raise CheckpointError(f"{name} was frozen so far, and changed while the checkpoint was written")
        nbytes += disk.size(partial)
        disk.replace(partial, file)
        disk.sync_folder(folder)
        disk.sync_folder(folder.parent)
    return nbytes
