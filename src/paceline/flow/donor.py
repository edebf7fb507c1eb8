# SPDX-License-Identifier: Apache-2.0
"""The donor sends its state to workers that join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.communication.base import Pending
from paceline.errors import PeerLostError
from paceline.flow.membership import ElasticMembership
from paceline.flow.state_transfer import PackedState, held_by
from paceline.update.monitor import Monitor


class Donor:
    """Sends this worker's state to joining workers, if the control plane names it the donor.

    Args:
        membership: this worker's membership.
        monitor: writes the event log.
        given: gives the state and the global model for joining workers that hold the frozen tensors of these keys.
        frozen_keys: gives the keys of this worker's frozen tensors.
    """

    def __init__(
        self,
        membership: ElasticMembership,
        monitor: Monitor,
        given: Callable[[dict[str, str]], tuple[dict[str, Any], dict[str, Any]]],
        frozen_keys: Callable[[], dict[str, str]],
    ) -> None:
        self._membership, self._monitor, self._given, self._frozen_keys = membership, monitor, given, frozen_keys
        self._sending: list[Pending] = []  # held until sent, or replaced by later ones

    def give(self) -> None:
        """If this worker is the donor, send the state to the generation's joining workers, in the background."""
        membership, generation = self._membership, self._membership.generation
        if generation.donor != membership.control.worker or not generation.newcomers:
            return
        ranks = [membership.rank_of(worker) for worker in sorted(generation.newcomers)]
        self._sending = []
        try:
            packed = PackedState(*self._given(held_by(membership.transport, ranks, self._frozen_keys())))
            for rank in ranks:
                self._sending += packed.give(membership.transport, rank)
        except PeerLostError:
            return  # the members will change again
        self._monitor.note("gave", workers=sorted(generation.newcomers), bytes=packed.nbytes)
