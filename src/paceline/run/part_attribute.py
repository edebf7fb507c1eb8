# SPDX-License-Identifier: Apache-2.0
"""Attributes of `Run` that read a value from one of its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from paceline.run.assembly import RunParts
from paceline.run.progress import MainLogger, progress

T = TypeVar("T")


class PartAttribute(property, Generic[T]):
    """A read-only attribute.

    Args:
        read: reads it from the run's parts.
        doc: its docstring.
    """

    def __init__(self, read: Callable[[RunParts], T], doc: str) -> None:
        super().__init__(lambda run: read(run._parts))
        self.__doc__ = doc  # else help() shows the class's docstring

    if TYPE_CHECKING:

        def __get__(self, run: Any, owner: type | None = None) -> T:  # type: ignore[override]
            """The value at present."""


def _unsaid(*values: object, **settings: Any) -> None:
    """What `run.print` is on workers that do not speak for all."""


IS_MAIN = PartAttribute(
    lambda parts: parts.context.transport.world.rank == 0,
    "Whether this worker speaks for all: it has rank 0. For what is to be done once, and asks no other worker.",
)
PROGRESS = PartAttribute(
    lambda parts: partial(progress, parts),
    "`run.progress(range(epochs))`: iterates over the outermost loop, and tells `paceline run` when the run ends.",
)
LOGGER = PartAttribute(
    lambda parts: MainLogger(lambda: parts.context.transport.world.rank == 0),
    'A logger, named "program", that writes on the worker of rank 0 only.',
)
PRINT = PartAttribute(
    lambda parts: print if parts.context.transport.world.rank == 0 else _unsaid,
    "As Python's `print`, on the worker of rank 0 only.",
)
