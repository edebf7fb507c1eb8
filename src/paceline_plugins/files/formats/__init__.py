# SPDX-License-Identifier: Apache-2.0
"""Formats of model files: the floating-point numbers come out as tensors, and all other bytes stay as they are.

============  ===========================================================================
:mod:`.spans`  numbers that lie in a file as they lie in memory, and the bytes between them
:mod:`.flat`  raw numbers with a layout that the user gives
:mod:`.numpy_files`  .npy and .npz
:mod:`.safetensors_files`  .safetensors
:mod:`.kaldi`  Kaldi's binary matrices and vectors, wherever they stand in a file
:mod:`.kaldi_text`  the same in text
:mod:`.caffe`  the blobs of a .caffemodel
============  ===========================================================================

:func:`recognise` chooses one by a file's first bytes and its name.
"""

from __future__ import annotations

from paceline_plugins.files.formats.choice import NAMES, named, recognise
from paceline_plugins.files.formats.model_file import Format, ModelFile, check_same

__all__ = ["NAMES", "Format", "ModelFile", "check_same", "named", "recognise"]
