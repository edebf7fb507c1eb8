# SPDX-License-Identifier: Apache-2.0
"""A worker's connection ends with the worker, also where children of it live on."""

from __future__ import annotations

import os
import signal

import pytest

from paceline.control import Terms
from tests.control.cluster import SOON, control, member


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_a_worker_does_not_keep_its_connection() -> None:
    """As the workers of a DataLoader do, which outlive a killed parent for a while."""
    with control(Terms(timeout_s=SOON)) as (server, log):
        one = member(server.port)
        one.enter()
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            one._link._channel._sock.close()  # what the kernel does where the parent dies: no shutdown
            assert "connection closed" in log.wait("lost", worker=0)["why"]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            one.close()
