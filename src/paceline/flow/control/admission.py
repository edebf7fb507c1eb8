# SPDX-License-Identifier: Apache-2.0
"""Which certificates the control plane accepts: those of the job that nobody has revoked.

Every worker is tied to the certificate with which it joined. It has to show the same one when it reconnects and for its
heartbeats, and the other members ask for it by its ID, so no other member can take its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.communication.sockets.identity import CONTROL, Identity
from paceline.errors import RefusedError

REMEMBERED = 4096
"""Workers whose certificates are remembered, the newest."""


class Admission:
    """Keeps the certificates.

    Attributes:
        revoked: ID -> why.
        closed: why no certificate is accepted that has not joined before; empty if new ones are.
    """

    def __init__(self) -> None:
        self.revoked: dict[str, str] = {}
        self.closed = ""
        self._known: dict[int, tuple[str, str]] = {}  # worker -> ID and name of its certificate

    def check(self, identity: Identity | None) -> None:
        """RefusedError if a worker may not come with that certificate."""
        if identity is None:
            return
        if identity.role == CONTROL:
            raise RefusedError(f"{identity} claims to be a worker, and has the certificate of a control plane")
        if identity.id in self.revoked:
            raise RefusedError(f"{identity} is refused: its certificate was revoked: {self.revoked[identity.id]}")
        if self.closed and identity.id not in {one for one, _ in self._known.values()}:
            raise RefusedError(f"{identity} is refused: it is new, and no new certificates are accepted: {self.closed}")

    def joined(self, worker: int, identity: Identity | None) -> None:
        """A worker has joined."""
        if identity is not None:
            self._known[worker] = identity.id, str(identity)
            while len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]

    def mismatch(self, worker: int, identity: Identity | None) -> str:
        """Why that certificate is not the one of `worker`; empty if it is."""
        known = self._known.get(worker)
        if identity is None or known is None or known[0] == identity.id:
            return ""
        return f"{identity} claims to be worker {worker}, which is {known[1]}"

    def of_workers(self, workers: Iterable[int]) -> tuple[list[str], list[int]]:
        """The certificates of these, and those among them of whom none is known."""
        asked = list(workers)
        return [self._known[one][0] for one in asked if one in self._known], [
            one for one in asked if one not in self._known
        ]

    def holders(self, certificates: Iterable[str]) -> list[int]:
        """The workers that joined with one of these."""
        wanted = set(certificates)
        return [worker for worker, (one, _) in self._known.items() if one in wanted]

    def state(self) -> dict[str, Any]:
        """For the record."""
        known = [[worker, one, name] for worker, (one, name) in self._known.items()]
        return {"revoked": self.revoked, "closed": self.closed, "known": known}

    def load(self, state: dict[str, Any]) -> None:
        """Load a result of `state`; a record of an earlier version has none."""
        self.revoked = {str(one): str(why) for one, why in state.get("revoked", {}).items()}
        self.closed = str(state.get("closed", ""))
        self._known = {int(worker): (str(one), str(name)) for worker, one, name in state.get("known", [])}
