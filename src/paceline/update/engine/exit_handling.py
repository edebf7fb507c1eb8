# SPDX-License-Identifier: Apache-2.0
"""The end of a program: closes open runs together on all workers, unless the program failed."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from paceline.communication import Transport, virtual
from paceline.core import runtime
from paceline.core.optimizer_state import Named
from paceline.errors import EXPELLED, GivenUpError, OverError, UnsupportedError

trained: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""The parameters of attached runs, by id."""


def close_at_exit(run: virtual.Closable) -> Callable[[], None]:
    """Close `run` when its program (or virtual worker) ends, if it is still open; returns a function that cancels this.

    A program that ends with an error leaves at once instead, so that its peers see it and do not wait. The run is kept
    alive until then, even if the user holds no reference.
    """
    transport = virtual.current()
    if transport is not None:
        cluster, rank = transport.cluster, transport.world.rank
        cluster.endings[rank].append(run)
        return lambda: cluster.endings[rank].remove(run)
    if runtime.host() is not None:  # the end of this interpreter is not that of a simulated process
        return lambda: None

    def finish() -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # ends the interpreter
        (run.abandon if error is not None else run.close)()
        if isinstance(error, GivenUpError):  # the launcher learns that it may start a fresh worker
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXPELLED)

    atexit.register(finish)
    return lambda: atexit.unregister(finish)


def exit_after_end(error: OverError) -> NoReturn:
    """Exit with status 0: this worker joined after all workers of its run had finished."""
    print(f"paceline: {error}; this worker has nothing left to do", file=sys.stderr, flush=True)
    raise SystemExit(0) from None


def release(owned: list[tuple[Any, Named]]) -> None:
    """Forget these parameters: their run is over."""
    for _, named in owned:
        for _, parameter in named:
            trained.pop(id(parameter), None)


def claim(transport: Transport, owned: list[tuple[Any, Named]]) -> None:
    """Record that a run of this process trains these parameters.

    Refuses a parameter that two virtual workers attach: they must not share a model.
    """
    trained.update((id(parameter), parameter) for _, named in owned for _, parameter in named)
    if transport.cluster is None:
        return
    for _, named in owned:
        for name, parameter in named:
            owner = transport.cluster.owners.setdefault(id(parameter), (transport.world.rank, parameter))
            if owner[0] != transport.world.rank:
                one, other = sorted((owner[0], transport.world.rank))
                raise UnsupportedError(
                    f"virtual workers {one} and {other} attached the same parameter {name}; each "
                    "must build a model of its own, inside the function or script that is run (a module that the "
                    "script imports is loaded once for all of them)"
                )
