# SPDX-License-Identifier: Apache-2.0
"""The end of a program: closes open runs together on all workers, unless the program failed."""

from __future__ import annotations

import atexit
import builtins
import functools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from paceline.communication import Transport, virtual
from paceline.core import runtime
from paceline.core.optimizer_state import Named
from paceline.errors import EXPELLED, GivenUpError, OverError, PacelineError, UnsupportedError

FAILED = 1
"""Exit code of a program whose run could not be ended in order."""
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
        ending = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # ends the interpreter
        if ending is None and _exit.failed(run):
            print(f"paceline: {_exit} ends this worker, and the others learn of it", file=sys.stderr, flush=True)
            run.abandon(SystemExit(f"{_exit}"))
        elif ending is not None:
            run.abandon(ending)
        else:
            try:
                run.close()
            except PacelineError as error:  # at the interpreter's end no exception becomes a failure any more
                sys.excepthook(type(error), error, error.__traceback__)
                _leave(FAILED)
        if isinstance(ending, GivenUpError):  # the launcher learns that it may start a fresh worker
            _leave(EXPELLED)

    _exit.watch(run)
    atexit.register(finish)
    return lambda: atexit.unregister(finish)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Exit:
    """The last call of `sys.exit`, `exit` or `quit`: what it raises ends the interpreter, and leaves no trace there."""

    def __init__(self) -> None:
        self._code: Any = None
        self._then: dict[int, int] = {}  # id of a run that was open -> its minibatches
        self._runs: weakref.WeakSet[virtual.Closable] = weakref.WeakSet()

    def __str__(self) -> str:
        return f"sys.exit({self._code!r})"

    def watch(self, run: virtual.Closable) -> None:
        self._runs.add(run)
        for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            original = getattr(place, name, None)
            if original is not None and not hasattr(original, "_paceline"):
                setattr(place, name, self._noting(original))

    def _noting(self, original: Any) -> Callable[..., NoReturn]:
        @functools.wraps(original)
        def noted(code: Any = None, /) -> NoReturn:
            self._code, self._then = code, {id(run): run.minibatches for run in self._runs}
            original(code)
            raise AssertionError("it has raised SystemExit")

        noted._paceline = True  # type: ignore[attr-defined]
        return noted

    def failed(self, run: virtual.Closable) -> bool:
        """Whether the program said with it, after the last step of `run`, that it has failed."""
        return not succeeded(self._code) and self._then.get(id(run)) == run.minibatches


_exit = _Exit()


def succeeded(code: Any) -> bool:
    """Whether the code of a SystemExit is that of success."""
    return code is None or (isinstance(code, int) and code == 0)


def exit_after_end(error: OverError) -> NoReturn:
    """Exit with status 0: this worker joined after all workers of its run had finished."""
    print(f"paceline: {error}; this worker has nothing left to do", file=sys.stderr, flush=True)
    raise SystemExit(0) from None


def release(owned: list[tuple[Any, Named]]) -> None:
    for _, named in owned:
        for _, parameter in named:
            trained.pop(id(parameter), None)


def claim(transport: Transport, owned: list[tuple[Any, Named]]) -> None:
    """Record that a run of this process trains these parameters. Refuses a parameter that two virtual workers
    attach."""
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
