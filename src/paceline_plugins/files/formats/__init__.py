# SPDX-License-Identifier: Apache-2.0
"""Formats of model files: the floating-point numbers come out as tensors, and all other bytes stay as they are.

============  ===========================================================================
:mod:`.spans`  numbers that lie in a file as they lie in memory, and the bytes between them
:mod:`.flat`  raw numbers with a layout that the user gives
:mod:`.numpy_files`  .npy and .npz
:mod:`.safetensors_files`  .safetensors
:mod:`.kaldi`  Kaldi's binary matrices and vectors, wherever they stand in a file
:mod:`.caffe`  the blobs of a .caffemodel
============  ===========================================================================

:func:`recognise` chooses one by a file's first bytes and its name.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import DataError
from paceline_plugins.files.formats import kaldi, safetensors_files
from paceline_plugins.files.formats.caffe import Caffe
from paceline_plugins.files.formats.flat import Flat
from paceline_plugins.files.formats.kaldi import Kaldi
from paceline_plugins.files.formats.model_file import Format, ModelFile, check_same
from paceline_plugins.files.formats.numpy_files import NPY, ZIP, Npy, Npz
from paceline_plugins.files.formats.safetensors_files import Safetensors

__all__ = ["NAMES", "Format", "ModelFile", "check_same", "named", "recognise"]

NAMES = {one.name: one for one in (Npy, Npz, Safetensors, Kaldi, Caffe)}
"""Formats that need no layout."""


def named(name: str, layout: str | None) -> Format:
    """The format of that name."""
    if name == Flat.name or layout is not None:
        if name != Flat.name or layout is None:
            raise DataError("raw numbers need a layout, and no other format takes one")
        return Flat(layout)
    if name not in NAMES:
        raise DataError(f"there is no format {name!r}; there are {', '.join([*NAMES, Flat.name])}")
    return NAMES[name]()


def recognise(path: Path, data: bytes) -> Format:
    """The format of a file, by its first bytes and its name.

    Raises:
        DataError: none is recognised.
    """
    if data.startswith(NPY):
        return Npy()
    if data.startswith(ZIP):
        return Npz()
    if path.suffix == ".caffemodel":
        return Caffe()
    if safetensors_files.looks_like(data):
        return Safetensors()
    if kaldi.looks_like(data):
        return Kaldi()
    raise DataError(
        f"the format of {path} is not recognised ({len(data):,} bytes, the first are {data[:8]!r}); known are "
        f"{', '.join(NAMES)}: name it with --layout, also the layout of raw numbers (such as --layout f32)"
    )
