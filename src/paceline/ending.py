# SPDX-License-Identifier: Apache-2.0
"""The end of a program: runs that were not closed come to their end together, unless the program failed."""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import Any, Protocol

from paceline.errors import UnsupportedError
from paceline.transport import Transport, virtual
from paceline.update import Named


class _Closable(Protocol):
    def close(self) -> None: ...

    def abandon(self) -> None: ...


def at_end(run: _Closable) -> None:
    """Close `run` when its program (or virtual worker) ends, if nobody has by then.

    A program that ends with an error leaves at once instead, so that its peers hear of it and do not wait.
    """
    reference = weakref.ref(run)

    def finish(failed: bool) -> None:
        here = reference()
        if here is not None:
            (here.abandon if failed else here.close)()

    transport = virtual.current()
    if transport is not None:
        transport.cluster.at_end(transport.world.rank, finish)
    else:
        atexit.register(lambda: finish(_failed()))


def _failed() -> bool:
    """Whether the interpreter is ending because of an exception that nobody caught."""
    return getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None


def claim(transport: Transport, owned: list[tuple[Any, Named]]) -> None:
    """Refuse a parameter that two virtual workers attach: they must not share a model."""
    if not isinstance(transport, virtual.VirtualTransport):
        return
    for _, named in owned:
        for name, parameter in named:
            owner = transport.cluster.owners.setdefault(id(parameter), (transport.world.rank, parameter))
            if owner[0] != transport.world.rank:
                raise UnsupportedError(
                    f"virtual workers {owner[0]} and {transport.world.rank} attached the same parameter {name}; each "
                    "must build a model of its own, inside the function or script that is run (a module that the "
                    "script imports is loaded once for all of them)"
                )
