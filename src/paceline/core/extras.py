# SPDX-License-Identifier: Apache-2.0
"""Optional packages: the error that names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import PacelineError


class MissingExtraError(PacelineError, ImportError):
    """A package that belongs to an extra is not installed."""


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Context for the import of an optional package; raises `MissingExtraError` if it is not installed.

    Args:
        what: the feature that needs it, as the beginning of a sentence.
        extra: the extra of paceline that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs {error.name}, which is not installed: pip install 'paceline[{extra}]'", name=error.name
        ) from error
