# SPDX-License-Identifier: Apache-2.0
"""A worker leaves an elastic run in order, while the others go on: the control plane's part of it.

It says so once all of its work is committed, so nothing is lost: what it still leases goes to other workers. The last
member that holds the state is told that it is, and may save it before it says goodbye again.
"""

from __future__ import annotations

from paceline.flow.control.membership import MembershipState


def leave(machine: MembershipState, worker: int, anyway: bool, now: float) -> None:
    """A worker says goodbye before the end of its program.

    Args:
        machine: the state machine.
        worker: its number.
        anyway: whether it leaves even if no other member holds the state.
        now: the time.
    """
    record = machine.workers.get(worker)
    if record is None:
        return
    others = [one for one in machine.members if one is not record]
    if record.holds and not anyway and not any(one.holds for one in others):
        machine.outbox.send(worker, "alone", 0, (len(others),))
        return
    machine.bye(worker, now, early=True)
