# SPDX-License-Identifier: Apache-2.0
"""A stand-in for requests: whatever is asked for is the file `cora.tgz` of the working folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Answer:
    """To be read as a stream."""

    def __enter__(self) -> Answer:
        self.raw = Path("cora.tgz").open("rb")
        return self

    def __exit__(self, *failure: object) -> None:
        self.raw.close()


def get(*args: Any, **kwargs: Any) -> Answer:
    """The file."""
    return Answer()
