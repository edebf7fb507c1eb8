# SPDX-License-Identifier: Apache-2.0
"""A model on disk: model.safetensors and model.json in a folder.

model.json holds the model's arguments and the checksum of the weights, so that `load` refuses a folder in which a save
was interrupted or to which a file of another model was copied. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as read_weights
from safetensors.torch import save as write_weights
from torch import Tensor, nn

from paceline import CheckpointError

WEIGHTS, ABOUT = "model.safetensors", "model.json"
LAYERS = 1000  # more are a damaged number, and building them would take hours
Model = TypeVar("Model", bound=nn.Module)
Own = TypeVar("Own", bound="Saved")
About = dict[str, Any]


class Saved(nn.Module):
    """A model that can be saved and read again.

    Attributes:
        FORMAT: name of its kind of model.
        about: the constructor's arguments.
    """

    FORMAT: ClassVar[str]
    about: About

    def save(self, folder: str | Path) -> None:
        """Write model.safetensors and model.json into `folder`, which is created if needed."""
        save(folder, self.FORMAT, self.about, self)

    @classmethod
    def load(cls: type[Own], folder: str | Path) -> Own:
        """The model that `save` wrote, on the CPU and in eval mode; CheckpointError if it is damaged."""
        return load(folder, cls.FORMAT, cls)


def save(folder: str | Path, format: str, about: About, model: nn.Module) -> None:
    """Write both files beside the old ones, then replace these."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = write_weights({name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(model).items()})
    text = json.dumps({"format": format, "model": about, "sha256": hashlib.sha256(weights).hexdigest()}, indent=2)
    _beside(folder / WEIGHTS).write_bytes(weights)
    _beside(folder / ABOUT).write_text(text + "\n", encoding="utf-8")
    for name in (WEIGHTS, ABOUT):
        os.replace(_beside(folder / name), folder / name)


def load(folder: str | Path, format: str, make: Callable[..., Model]) -> Model:
    """The model that `save` wrote, on the CPU, in eval mode; `make` builds it from what `about` says.

    Raises:
        CheckpointError: a file is missing, damaged, of another save, or does not fit the other.
    """
    folder = Path(folder)
    about, sum = _read_about(folder / ABOUT, format)
    try:
        data = (folder / WEIGHTS).read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / WEIGHTS}: {error}; save the model again") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sum:
        raise CheckpointError(
            f"{folder / WEIGHTS} has the checksum {found[:12]}, {ABOUT} beside it names {sum[:12]}: it is damaged or "
            "of another save; save the model again"
        )
    try:
        weights = read_weights(data)
        with torch.device("meta"):  # what it would look like, before any memory is asked for
            wanted = _tensors(make(**about))
        _check_shapes(folder, wanted, weights)
        model = make(**about)
    except CheckpointError:
        raise
    except (SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder} holds no model that can be made: {error}; save it again") from error
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            tensor.data = weights[name]
    return model.eval()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _read_about(path: Path, format: str) -> tuple[About, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; is this the folder of a saved model?") from error
    if not isinstance(found, dict) or found.get("format") != format:
        seen = found.get("format") if isinstance(found, dict) else found
        raise CheckpointError(f"{path} is of the format {json.dumps(seen)}, wanted is {json.dumps(format)}")
    about, sum = found.get("model"), found.get("sha256")
    if not isinstance(about, dict) or not isinstance(sum, str):
        raise CheckpointError(f"{path} lacks the model's description or the weights' checksum; save the model again")
    layers = about.get("layers", 1)
    if not isinstance(layers, int) or layers > LAYERS:
        raise CheckpointError(f"{path} names {layers} layers; save the model again")
    return about, sum


def _check_shapes(folder: Path, wanted: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    for name in sorted(wanted.keys() | weights.keys()):
        made = list(wanted[name].shape) if name in wanted else None
        found = list(weights[name].shape) if name in weights else None
        if made != found:
            raise CheckpointError(
                f"{folder / WEIGHTS} has {name} of shape {found}, {ABOUT} makes it {made}; save the model again"
            )
