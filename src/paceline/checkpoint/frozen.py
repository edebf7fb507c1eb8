# SPDX-License-Identifier: Apache-2.0
"""Frozen tensors in checkpoints: their values are written once, and a step names them by key.

::

    DIR/frozen/KEY.safetensors      the values of one frozen tensor, for all steps in DIR that name its key
    PATH/global.safetensors         has them, of a single checkpoint

A key tells the values (:func:`paceline.core.bits.key`). Where a resume finds the same key in the program, which mostly
loads the same base again, it reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.files import FROZEN, GLOBAL, checked, frozen_name, read_tensors, write_tensors
from paceline.core import runtime
from paceline.core.bits import key, memory
from paceline.errors import CheckpointError

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
    """Put what `without` has taken out of a model into it again.

    Args:
        model: name -> tensor; changed.
        saved: the state beside it, with the keys of the "frozen" tensors and the first names of "tied" ones.
        own: this worker's model.
        read: the values of a frozen tensor.
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
    """Write the frozen tensors, key -> (name, values), that are not in `folder` yet; the bytes written.

    Raises:
        CheckpointError: one of them has changed since its key was taken.
    """
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
