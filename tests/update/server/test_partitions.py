# SPDX-License-Identifier: Apache-2.0
"""Silence: a link that carries nothing any more, and processes that stand still, between real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from benchmarks._network import EmulatedNetwork

from tests.processes.launch import Launch
from tests.update.server.test_socket_service import Faulty, events, until_lost

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
CUT_OFF = "PeerLostError: this worker is cut off from most of the"


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.skipif(bool(EmulatedNetwork.possible()), reason=EmulatedNetwork.possible())
def test_of_two_halves_of_a_network_one_goes_on(tmp_path: Path) -> None:
    """Two hosts of two workers; nobody says that the link between them is cut."""
    with EmulatedNetwork(2) as network:

        def place(rank: int) -> tuple[list[str], dict[str, str]]:
            host = rank // 2
            more = {"MASTER_ADDR": network.address(0), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
            return network.prefix(host), network.environment(host) | more

        with Launch(
            "faulty", 4, tmp_path, "asgd", "sgd", "24", "60", module="asynchronous_programs", place=place
        ) as launch:
            for rank in range(4):
                launch.until(f"going.{rank}")
            network.cut(1)
            for ended in launch.wait([2, 3]).values():
                assert ended.code not in (0, -signal.SIGABRT) and CUT_OFF in ended.err, ended.err
            for lost in (2, 3):
                for event in until_lost(launch, [0, 1], lost):
                    assert event["why"] == "gave no sign of life for 6 s", "a quarter of the timeout"
            (tmp_path / "enough").touch()
            assert all(ended.code == 0 for ended in launch.wait([0, 1]).values()), launch.said()


def test_of_two_workers_the_first_goes_on(tmp_path: Path) -> None:
    """The second cannot tell a process that stands still from a link that is cut: it stops, and says why."""
    with Faulty(tmp_path, 2, "asgd", timeout_s="8") as launch:
        launch.under_way()
        launch.strike(0, signal.SIGSTOP)
        ended = launch.wait([1])[1]
        assert ended.code != 0 and CUT_OFF in ended.err and "gave no sign of life for 2 s" in ended.err, ended.err
        assert not events(tmp_path / "log", 1, "lost")
        launch.strike(0, signal.SIGCONT)
        (tmp_path / "enough").touch()
        assert launch.wait([0])[0].code == 0, launch.said()
