# SPDX-License-Identifier: Apache-2.0
"""How a worker of an elastic run gets the run's state, and when it reports that it holds it.

A joining worker loads the state that a live worker sent, and holds it from then on. If no member holds one (at the
start, or after all holders are lost), all members start from rank 0's model, and mostly resume from a checkpoint at
once. Until then none reports that it holds the state: the control plane could else have an untrained model saved as
the newest step, or sent to joining workers. So a worker reports it after `run.resume`, or, if the program does not
call that, before the first batch or step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.communication.calls import AGREEMENT
from paceline.errors import CheckpointError, GivenUpError, PeerLostError
from paceline.flow.membership import ElasticMembership
from paceline.flow.state_transfer import GivenState, receive_state, tell_held
from paceline.update.engine import agreement
from paceline.update.engine.agreement import take_untrained

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.flat import Fragment
    from paceline.core.optimizer_state import Owned
    from paceline.update.engine.blocks.model import FragmentedModel

logger = logging.getLogger("paceline")


class Joining:
    """Gets the run's state for a worker.

    Args:
        membership: its membership.
        owned: (optimizer, its named parameters) pairs.
        parts: the exchanged tensors, which all members start with alike.
        rest: (name, tensor) pairs that are not exchanged.
        frozen_keys: gives the keys of the large ones of them.

    Attributes:
        given: the state that a live worker sent, if this worker joined; else None.
        must_resume: whether all workers that held the model are lost, so that only a checkpoint has it.
        settled: whether this worker has reported that it holds the state.
        put: loads the given state.
        blocks: this worker's blocks.
        wanted: gives the members that are wanted, as this worker's state says; 0: it does not.
    """

    def __init__(
        self,
        membership: ElasticMembership,
        owned: Owned,
        parts: list[Fragment],
        rest: Sequence[tuple[str, Tensor]] = (),
        frozen_keys: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self._membership, self._owned, self._parts, self._rest = membership, owned, parts, rest
        self._frozen_keys = frozen_keys
        self._keys = frozen_keys()  # before this worker is a member, and others wait for it
        self.given: GivenState | None = None
        self.must_resume = self.settled = False
        self.put: Callable[[GivenState], None] = lambda given: None
        self.blocks: FragmentedModel | None = None
        self.wanted: Callable[[], int] = lambda: 0

    def start(self) -> None:
        """Receive the donor's state, or start with all members from rank 0's model."""
        membership, self.given = self._membership, None
        while True:
            try:
                if membership.new and membership.generation.donor is not None:
                    limit = (1 << 26) + 256 * sum(p.numel() for _, named in self._owned for _, p in named)
                    limit += sum(t.numel() * t.element_size() for _, t in self._rest)
                    limit += 32 * sum(part.numel for part in self._parts)
                    donor = membership.rank_of(membership.generation.donor)
                    told = tell_held(membership.transport, donor, self._keys)
                    self.given = receive_state(membership.transport, donor, limit)
                    if told is not None:
                        told.wait()
                    self.must_resume = False
                else:
                    self.must_resume = membership.generation.restored
                    with membership.transport.calling(AGREEMENT):  # other members are in attach
                        agreement.broadcast_start(membership.transport, self._parts)
                        take_untrained(membership.transport, self._rest)
                return
            except GivenUpError:
                raise
            except PeerLostError as error:
                membership.renew(membership.failed(error))

    def take_given(self) -> None:
        """Load the given state, if any, and report that this worker holds it."""
        while self.given is not None and not self.settled:
            self.put(self.given)
            self._report_state()

    def ready(self) -> None:
        """Before the first batch, step or exchange: report that this worker holds its initial state.

        Raises:
            CheckpointError: only a checkpoint has the model, and the program has not called `run.resume`.
        """
        while not self.settled:
            if self.must_resume:
                raise CheckpointError(
                    self._membership.transport.world.sign(
                        "every worker that held the model of this run is gone, so that it goes on from its last "
                        "checkpoint only: call run.resume() before the training loop, or start a new run in another "
                        "log directory"
                    )
                )
            self._report_state()

    def resume(self, resume: Callable[[], bool]) -> bool:
        """Resume from a checkpoint, all members together; repeated if they change meanwhile.

        Args:
            resume: resumes once; returns whether there was a checkpoint.

        Returns:
            True if there was one, or a live worker sent this worker the state.
        """
        if self.settled:
            return self.given is not None or resume()
        found = False
        while not self.settled:
            try:
                found = resume()
            except GivenUpError:
                raise
            except PeerLostError as error:
                self._restart(error)
                continue
            if self.must_resume and not found:
                logger.warning("%s", self._membership.transport.world.sign(ANEW))
            self.must_resume = False
            self._report_state()
        self._membership.follow_control()  # workers that the checkpoint wants may have joined
        return found or self.given is not None

    def _restart(self, error: PeerLostError) -> None:
        """The members have changed: get their state once more."""
        self._membership.renew(self._membership.failed(error))
        self._start_again()

    def _report_state(self) -> None:
        """Report that this worker holds the state; it is not settled if the members had changed before."""
        membership = self._membership
        membership.control.holds_state(
            membership.generation.number, self.blocks.block if self.blocks is not None else 0, self.wanted()
        )
        membership.control.ledger()  # its answer follows all earlier messages
        self.settled = (
            not membership.outdated or membership.control.worker not in membership.control.generation.newcomers
        )
        if self.settled:
            membership.applied = membership.generation.exchange
            if self.blocks is not None:
                self.blocks.renumber(membership.transport.world.size)  # all members compare the same sums
            return
        membership.renew(membership.control.generation)
        self._start_again()

    def _start_again(self) -> None:
        self._keys = self._frozen_keys()  # a state may have been loaded
        self.start()
        if self.blocks is not None:
            self.blocks.capture()
        self.take_given()


ANEW = (
    "every worker that held the model of this run is gone, and no step of it was written yet: the training begins anew"
)
