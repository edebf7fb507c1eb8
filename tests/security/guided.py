# SPDX-License-Identifier: Apache-2.0
"""Fuzzing that follows the code's branches, with atheris where that is installed (it is no dependency of ours).

::

    pip install atheris
    python -m tests.security.guided header -max_total_time=200    # then: note, state, call

What each target may raise is one of paceline's own errors; anything else is a finding, and ends the program.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(
    include=["paceline.communication.sockets.frames", "paceline.core.state_tree", "paceline.core.parse"]
):
    from paceline.communication.sockets.frames import HEADER_BYTES, MAGIC, FrameHeader, read_note
    from paceline.core.parse import read_call
    from paceline.core.state_tree import build
    from paceline.errors import CheckpointError, MismatchError, RuleError

LIMIT = 1 << 20


def header(data: bytes) -> None:
    """88 bytes from a wire."""
    data = data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    for head in (data, MAGIC + data[len(MAGIC) :]):
        try:
            found = FrameHeader.read(head, LIMIT)
        except MismatchError:
            continue
        assert found.body_bytes <= LIMIT and found.pack() == head


def note(data: bytes) -> None:
    """The JSON note of a frame."""
    with contextlib.suppress(MismatchError):
        read_note(data)


def state(data: bytes) -> None:
    """The JSON file of a checkpoint."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    with contextlib.suppress(CheckpointError):
        build(value, {})


def call(data: bytes) -> None:
    """A rule as it is written on a command line."""
    with contextlib.suppress(RuleError):
        read_call(data.decode("utf-8", "replace"), "rule", "bmuf()")


TARGETS: dict[str, Callable[[bytes], None]] = {one.__name__: one for one in (header, note, state, call)}

if __name__ == "__main__":
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()
