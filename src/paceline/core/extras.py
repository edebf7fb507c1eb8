# SPDX-License-Identifier: Apache-2.0
"""Packages that only some programs need: what to install where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import PacelineError


class MissingExtraError(PacelineError, ImportError):
    """A package that belongs to an extra is not installed."""


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Around the import of an optional package.

    Args:
        what: that needs it, as the beginning of a sentence.
        extra: of paceline, that brings it.

    Raises:
        MissingExtraError: it is not there.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs {error.name}, which is not installed: pip install 'paceline[{extra}]'", name=error.name
        ) from error
