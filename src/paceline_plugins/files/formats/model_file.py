# SPDX-License-Identifier: Apache-2.0
"""What is in a model file: named tensors, and the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from paceline.errors import DataError


@dataclass(frozen=True)
class ModelFile:
    """A model file in memory."""

    tensors: Mapping[str, Tensor]  # name -> numbers, in the order of the file, contiguous, of the file's own dtypes
    skeleton: bytes  # all other bytes, in a form that only the file's format reads


class Format(ABC):
    """Reads and writes model files.

    Law: `write(read(data)) == data`; with other numbers only their bytes differ.
    """

    name: str

    @abstractmethod
    def read(self, data: bytes, keep: Collection[str] = ()) -> ModelFile:
        """The tensors and the rest of a file.

        Args:
            data: the file's bytes.
            keep: names of tensors whose numbers stay in the skeleton.

        Raises:
            DataError: it is not of this format, or truncated; the message says where.
        """

    @abstractmethod
    def write(self, model: ModelFile) -> bytes:
        """The bytes of a file."""


def check_same(model: ModelFile, found: ModelFile, who: str) -> None:
    """Refuse a file whose tensors are not those of the model.

    Args:
        model: as it was.
        found: as the tool wrote it.
        who: names the file, for the message.
    """
    if len(found.tensors) != len(model.tensors):
        odd = next(iter(set(model.tensors) ^ set(found.tensors)), "")
        more = f", {odd!r} for one" if odd else ""
        raise DataError(
            f"{who} has {len(found.tensors)} tensors, and the model has {len(model.tensors)}{more}: is it truncated, "
            "or of another model?"
        )
    for (name, tensor), (other, new) in zip(model.tensors.items(), found.tensors.items(), strict=True):
        if (name, tensor.shape, tensor.dtype) != (other, new.shape, new.dtype):
            raise DataError(
                f"{who} has the tensor {_described(other, new)} where the model has {_described(name, tensor)}: a tool "
                "must write the model that it read, with other numbers"
            )


def _described(name: str, tensor: Tensor) -> str:
    return f"{name!r} of shape {tuple(tensor.shape)} and {str(tensor.dtype).removeprefix('torch.')}"
