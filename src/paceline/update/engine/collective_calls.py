# SPDX-License-Identifier: Apache-2.0
"""Calls of `Run` that every worker makes at the same place: their names, and `merge` among workers whose step counts
differ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from paceline.communication.calls import advice
from paceline.core.world import World
from paceline.errors import ElsewhereError
from paceline.update.exchange.header import ExchangeSummary

Method = TypeVar("Method", bound=Callable[..., Any])


def by_all(call: str) -> Callable[[Method], Method]:
    """Decorates a method of `Run` that every worker calls: mismatched calls are reported as `call`."""

    def around(method: Method) -> Method:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._transport.calling(call):
                return method(self, *args, **kwargs)

        return cast(Method, called)

    return around


class MergePoint:
    """Detects whether all workers call `run.merge()`.

    A merging worker keeps joining exchanges until all merge: another may have one more step, which ends a block. A
    worker that ends more blocks than that has not called `merge`.

    Args:
        world: this worker.
        fragments: exchanges of one merge.
    """

    def __init__(self, world: World, fragments: int) -> None:
        self._world, self._fragments = world, fragments
        self._apart = self.together = 0

    def begin(self) -> None:
        """A merge begins."""
        self.together = 0

    def look(self, summary: ExchangeSummary) -> None:
        """Count an exchange of blocks.

        Raises:
            ElsewhereError: some workers merge and others train on; raised on every worker.
        """
        merging = [rank for rank, h in enumerate(summary.headers) if h.merges]
        others = [rank for rank, h in enumerate(summary.headers) if not (h.merges or h.leaving or h.kind.joins)]
        self.together = 0 if others or not merging else self.together + 1
        self._apart = self._apart + 1 if merging and others else 0
        if self._apart > self._fragments:
            raise ElsewhereError(
                self._world.sign(
                    f"the workers make different calls: {self._world.names(merging)} in run.merge(), "
                    f"{self._world.names(others)} in optimizer.step(), at the end of a block. {advice('run.merge()')}"
                )
            )
