# SPDX-License-Identifier: Apache-2.0
"""A model on disk: model.safetensors, model.json and, where it has one, table.safetensors, in a folder.

model.json holds the model's arguments and the checksums of the other files, so that `load` refuses a folder in which a
save was interrupted or to which a file of another model was copied. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline import CheckpointError, MismatchError
from paceline_lightrnn import files
from paceline_lightrnn.table import WordTable

WEIGHTS, ABOUT, TABLE = "model.safetensors", "model.json", "table.safetensors"
Model = TypeVar("Model", bound=nn.Module)
About = dict[str, Any]


def save(folder: str | Path, format: str, about: About, model: nn.Module, table: WordTable | None = None) -> None:
    """Write the files beside the old ones, then replace these."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = [WEIGHTS] if table is None else [WEIGHTS, TABLE]
    save_file({n: p.detach().cpu().contiguous() for n, p in model.named_parameters()}, files.beside(folder / WEIGHTS))
    if table is not None:
        table.save(files.beside(folder / TABLE))
    sums = {name: files.sha256(files.beside(folder / name)) for name in names}
    text = json.dumps({"format": format, "model": about, "sha256": sums}, indent=2)
    files.beside(folder / ABOUT).write_text(text + "\n", encoding="utf-8")
    for name in [*names, ABOUT]:
        os.replace(files.beside(folder / name), folder / name)


def load(folder: str | Path, format: str, make: Callable[[About, WordTable | None], Model]) -> Model:
    """The model that `save` wrote, on the CPU; `make` builds it from `about` and the table.

    Raises:
        CheckpointError: a file is missing, damaged, or of another save.
    """
    folder = Path(folder)
    about, sums = _read_about(folder, format)
    for name, sum in sums.items():
        _check_sum(folder / name, sum)
    table = WordTable.load(folder / TABLE) if TABLE in sums else None
    try:
        weights = load_file(folder / WEIGHTS)
        if about.get("layers", 1) > len(weights):  # building them would take hours
            raise MismatchError(f"{about['layers']} layers have more than {len(weights)} tensors")
        with torch.device("meta"):  # compare shapes before allocating memory
            shapes = _shapes(make(about, table))
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} holds no model that can be made: {error}; save it again") from error
    _check_shapes(folder, shapes, weights)
    model = make(about, table).to(next(iter(weights.values())).dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def required(table: WordTable | None) -> WordTable:
    """The table; MismatchError if there is none."""
    if table is None:
        raise MismatchError(f"there is no {TABLE}")
    return table


def _read_about(folder: Path, format: str) -> tuple[About, dict[str, str]]:
    path = folder / ABOUT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; is this the folder of a saved model?") from error
    if not isinstance(found, dict) or found.get("format") != format:
        seen = found.get("format") if isinstance(found, dict) else found
        raise CheckpointError(f"{path} is of the format {json.dumps(seen)}, wanted is {json.dumps(format)}")
    about, sums = found.get("model"), found.get("sha256")
    if (
        not isinstance(about, dict)
        or not isinstance(sums, dict)
        or WEIGHTS not in sums
        or not set(sums) <= {WEIGHTS, TABLE}
    ):
        raise CheckpointError(f"{path} lacks the model's description or its files' checksums; save the model again")
    return about, sums


def _check_sum(path: Path, wanted: str) -> None:
    try:
        found = files.sha256(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}; save the model again") from error
    if found != wanted:
        raise CheckpointError(
            f"{path} has the checksum {found[:12]}, {ABOUT} beside it names {str(wanted)[:12]}: it is damaged or of "
            "another save; save the model again"
        )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _check_shapes(folder: Path, wanted: dict[str, tuple[int, ...]], weights: dict[str, Tensor]) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{folder / WEIGHTS} has {name} of shape {found.get(name)}, {ABOUT} makes it {wanted.get(name)}; "
                "save the model again"
            )
    kinds = sorted({str(tensor.dtype) for tensor in weights.values()})
    if len(kinds) > 1 or not next(iter(weights.values())).is_floating_point():
        raise CheckpointError(f"{folder / WEIGHTS} has numbers of type {', '.join(kinds)}; wanted is one kind of float")
