# SPDX-License-Identifier: Apache-2.0
"""Functions of the program whose beginning or end is a point at which a process may be killed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class KillPoints(ABC):
    """The points of one process."""

    @abstractmethod
    def at(self, point: str) -> None:
        """The process has reached `point`; it may be killed here."""

    def around(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Make the beginning and the end of a function points."""
        whole: Callable[..., Any] = getattr(owner, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.at(before)
            found = whole(*args, **kwargs)
            if after:
                self.at(after)
            return found

        setattr(owner, name, function)
