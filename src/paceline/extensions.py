# SPDX-License-Identifier: Apache-2.0
"""The seams of the core: what plugins and other distributions add to it by entry points of these groups.

An entry point's name is what the core asks for, and its object does the work. The core imports no plugin by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import UnsupportedError

TRANSPORTS = "paceline.transports"
"""Name of a transport -> `meet(timeout_s, group)`, which returns the connection of all workers."""
DIALERS = "paceline.dialers"
"""`relay` -> `join(where, tls, adopt, timeout_s)`: this process's place where no direct connection leads. It has an
`address`, an opaque text NAME@SITE that other members `dial`, `dial_control` for the control plane, and `close`;
`adopt` gets the connections of members that dialled it."""
STORES = "paceline.stores"
"""`remote` -> a class of :class:`paceline.checkpoint.store.StepStore` for a URL."""
ARRAYS = "paceline.arrays"
"""Library of arrays -> the class of a run over them."""
RENDEZVOUS = "paceline.rendezvous"
"""Protocol of a launcher -> `agree(worker, descriptor, timeout_s, opens)`, which returns where the workers meet."""
OBSERVERS = "paceline.observers"
"""Name of an observer -> its class, an :class:`Observer`; the argument of `attach` or the variable that asks for it has
its place in :mod:`paceline.run.attach`."""
STARTERS = "paceline.starters"
"""`zero` -> the module that starts unchanged programs; `virtual` -> its class for virtual workers."""
LAUNCHERS = "paceline.launchers"
"""`elastic`, `ssh`, `mpi` -> a module whose `run` starts the workers of `paceline run` in that way."""
SEALS = "paceline.seals"
"""`receipts` -> `make_seal(cluster, directory, sign, job)`, which returns what seals the receipts of a run."""
REMARKS = "paceline.remarks"
"""`forecast` -> `quality_forecast(run)`, whose `sentence` the report of a run shows."""
PAGES = "paceline.pages"
"""`watch` -> `serve(directory, host, port)`, which serves the page of a run."""


class Observer:
    """Watches one worker's run, and changes nothing of what it trains; `settings` are those that `check` returned."""

    @staticmethod
    def check(settings: Any) -> Any:
        """The settings with what the observer needs; nothing is built yet."""
        return settings

    def __init__(self, rule: Any, settings: Any, world: Any, loaders: Any, elastic: bool) -> None: ...

    def begin(self, context: Any, engine: Any, checkpointer: Any, close: Callable[[], None]) -> None:
        """The run is built; `close` closes it."""

    def gave(self, fragment: int, state: Mapping[str, Any]) -> None:
        """A block of this fragment is over, and what these tensors hold goes into an exchange."""

    def merged(self, fragment: int | None, number: int, state: Mapping[str, Any], summary: Any) -> None:
        """Exchange `number` was applied, and left this state; gradients were exchanged if `fragment` is None."""

    def stepped(self) -> None:
        """A step is over."""

    def saved(self) -> None:
        """A checkpoint step was taken at the top of the program's loop."""

    def load(self, context: Any, engine: Any) -> None:
        """The run goes on from another state."""

    def resumed(self) -> None:
        """`run.resume` is over."""

    def end(self) -> None:
        """The run ended in order."""

    def close(self) -> None:
        """Release all resources; may be called again."""


def extension(group: str, name: str) -> Any:
    """The object of an entry point.

    Raises:
        UnsupportedError: no installed distribution has it.
    """
    from importlib.metadata import entry_points  # takes 20 ms

    found = sorted(entry_points(group=group, name=name), key=lambda e: e.dist is None or e.dist.name != "paceline")
    if not found:
        raise UnsupportedError(
            f"no installed package has {name!r} for {group}: install paceline again, with its plugins "
            "(pip install paceline)"
        )
    return found[0].load()
