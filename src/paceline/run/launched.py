# SPDX-License-Identifier: Apache-2.0
"""A worker of `paceline.launch`: calls the function that the launching program has left in a folder, which nobody else
may enter: what is loaded here, it has written, and what it loads, its workers have."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import cloudpickle

from paceline.errors import PeerLostError, UnsupportedError

CALL, RESULT, ERROR = "call", "result", "error"


def result_file(folder: Path, rank: int) -> Path:
    """Of a worker's result."""
    return folder / f"{RESULT}-{rank}"


def error_file(folder: Path, rank: int) -> Path:
    """Of a worker's error: whether it lost another worker, when (seconds), class and message, the traceback."""
    return folder / f"{ERROR}-{rank}"


def main(folder: Path, rank: int) -> None:
    """Call the function, and leave its result or its error."""
    error_file(folder, rank).unlink(missing_ok=True)  # of an earlier start
    target, arguments = cloudpickle.loads((folder / CALL).read_bytes())
    try:
        data = _pickled(target(*arguments))
        file = result_file(folder, rank)
        file.with_suffix(".new").write_bytes(data)
        file.with_suffix(".new").replace(file)
    except Exception as error:
        headline = "".join(traceback.format_exception_only(error)).strip()
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this file's
        text = "".join(traceback.format_exception(type(error), error, frames))
        about = (isinstance(error, PeerLostError), time.time(), headline, text)
        error_file(folder, rank).write_bytes(cloudpickle.dumps(about))
        raise


def _pickled(result: object) -> bytes:
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise UnsupportedError(
            f"the function's result, {type(result).__name__}, cannot be given back to the launching program "
            f"({type(error).__name__}: {error}): return numbers, tensors or a state_dict"
        ) from error


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ.get("RANK", "0")))
