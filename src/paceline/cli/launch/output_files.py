# SPDX-License-Identifier: Apache-2.0
"""The files of a worker's output. If they cannot be opened (a full disk), the worker prints to nowhere."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)
_warned = False


@contextlib.contextmanager
def output_files(stdout: Path, stderr: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Both files, open for a new process."""
    with _opened(stdout) as out, _opened(stderr) as err:
        yield out, err


def _opened(path: Path) -> IO[bytes]:
    global _warned
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")
    except OSError as error:
        if not _warned:
            _warned = True
            logger.warning("the workers' output is lost from now on: %s", error)
        return open(os.devnull, "wb")
