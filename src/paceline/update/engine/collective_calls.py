# SPDX-License-Identifier: Apache-2.0
"""Calls of `Run` that every worker makes at the same place: what they are called, and `merge` among workers of which
one has a step less."""

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
    """A method of `Run` that every worker calls: its agreements say that they belong to `call`."""

    def around(method: Method) -> Method:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self._transport.calling(call):
                return method(self, *args, **kwargs)

        return cast(Method, called)

    return around


class MergePoint:
    """Whether the workers come to `run.merge()` together.

    One that merges goes on coming to exchanges until all do: another may have a step more to make, and end a block with
    it. Who ends more blocks than that does not come.

    Args:
        world: this worker.
        fragments: exchanges that a merge is made of.
    """

    def __init__(self, world: World, fragments: int) -> None:
        self._world, self._fragments = world, fragments
        self._apart = self.together = 0

    def look(self, summary: ExchangeSummary) -> None:
        """Count an exchange of blocks.

        Raises:
            ElsewhereError: some workers merge and others train on; on every worker alike.
        """
        merging = [rank for rank, h in enumerate(summary.headers) if h.merges]
        others = [rank for rank, h in enumerate(summary.headers) if not (h.merges or h.leaving)]
        self.together = 0 if others or not merging else self.together + 1
        self._apart = self._apart + 1 if merging and others else 0
        if self._apart > self._fragments:
            raise ElsewhereError(
                self._world.sign(
                    f"the workers make different calls: {self._world.names(merging)} in run.merge(), "
                    f"{self._world.names(others)} in optimizer.step(), at the end of a block. {advice('run.merge()')}"
                )
            )
