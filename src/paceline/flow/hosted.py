# SPDX-License-Identifier: Apache-2.0
"""The control plane of a run whose launcher has none, such as `torchrun`: rank 0 hosts it.

So the number of workers that train can grow under any launcher. Nobody replaces a lost worker there, and the run ends
with rank 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from paceline.communication import Transport
from paceline.communication.sockets.address import find_address
from paceline.core import runtime
from paceline.errors import PacelineError
from paceline.flow.control import ControlServer, Terms
from paceline.flow.membership import ElasticMembership
from paceline.update.engine.settings import Settings

LEAVE_S = 10.0
"""Seconds that rank 0 waits at the end for the other workers to leave."""
LOOK_AGAIN_S = 0.02
"""Between two looks at who has left, seconds."""
START_S = 60.0
"""Seconds that the first workers wait at most for the others."""


class HostedControl:
    """The control plane, in rank 0's process.

    Args:
        address: at which it listens.
        workers: of the launcher.
        settings: of the run.
    """

    def __init__(self, address: str, workers: int, settings: Settings) -> None:
        start_s = min(START_S, settings.timeout_s / 2)
        terms = Terms(max_workers=workers, timeout_s=settings.timeout_s, start_s=start_s, expected=workers)
        self._server = ControlServer(address, 0, settings.tls, terms)
        self._server.start()
        self.place = f"{address}:{self._server.port}"

    def close(self) -> None:
        """Wait until all workers have left if the run is over; dismiss them if it is not."""
        until = runtime.monotonic() + LEAVE_S
        while (status := self._server.status())["finished"] and runtime.monotonic() < until:
            if not (status["members"] or status["waiting"]):
                break
            runtime.sleep(LOOK_AGAIN_S)
        self._server.dismiss("rank 0, which hosts the control plane of this run, has left it")
        self._server.close()


def join_hosted(
    transport: Transport, settings: Settings, join: Callable[[Settings], ElasticMembership]
) -> ElasticMembership:
    """Become a worker of the run whose control plane rank 0 hosts; worker r is the launcher's rank r.

    Args:
        transport: among all workers of the launcher.
        settings: of the run.
        join: joins the run whose control plane the settings name.
    """
    world = transport.world
    address = find_address(world, transport.gather_json)
    hosted, problem = None, ""
    if world.rank == 0:
        try:
            hosted = HostedControl(address, world.size, settings)
        except (PacelineError, OSError) as error:  # reported to all workers below
            problem = str(error)
    with contextlib.ExitStack() as on_error:
        if hosted is not None:
            on_error.callback(hosted.close)
        place, problem = transport.gather_json([hosted.place if hosted is not None else "", problem])[0]
        if problem:
            raise PacelineError(world.sign(f"rank 0 cannot host the control plane of a run that grows: {problem}"))
        membership = _in_turn(transport, lambda: join(replace(settings, control=place)))
        on_error.pop_all()
    if hosted is not None:
        membership.on_close.append(hosted.close)
    return membership


def _in_turn(transport: Transport, join: Callable[[], ElasticMembership]) -> ElasticMembership:
    """Workers join in the order of their ranks, so that the first ones train first."""
    for _ in range(transport.world.rank):
        transport.barrier()
    membership = join()
    try:
        for _ in range(transport.world.rank, transport.world.size):
            transport.barrier()
    except BaseException:
        membership.close()
        raise
    return membership
