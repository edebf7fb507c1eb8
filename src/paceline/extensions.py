# SPDX-License-Identifier: Apache-2.0
"""The seams of the core: what plugins and other distributions add to it, found by entry points of these groups.

An entry point's name is what the core asks for, and its object does the work. The core imports no plugin by itself.
"""

from __future__ import annotations

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

STARTERS = "paceline.starters"
"""`zero` -> the module that starts unchanged programs; `virtual` -> its class for virtual workers."""
LAUNCHERS = "paceline.launchers"
"""`ssh` and `mpi` -> a module whose `run` starts the workers of `paceline run` in another way than on this host."""
SEALS = "paceline.seals"
"""`receipts` -> `make_seal(cluster, directory, sign, job)`, which returns what seals the receipts of a run."""
PAGES = "paceline.pages"
"""`watch` -> `serve(directory, host, port)`, which serves the page of a run."""


def extension(group: str, name: str) -> Any:
    """The object of an entry point.

    Raises:
        UnsupportedError: no installed distribution has it.
    """
    from importlib.metadata import entry_points  # takes 20 ms

    found = sorted(
        entry_points(group=group, name=name), key=lambda one: one.dist is None or one.dist.name != "paceline"
    )
    if not found:
        raise UnsupportedError(
            f"no installed package has {name!r} for {group}: install paceline again, with its plugins "
            "(pip install paceline)"
        )
    return found[0].load()
