# SPDX-License-Identifier: Apache-2.0
"""Silence: a link that carries nothing any more, and processes that stand still, between real processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from devtools.emulation import EmulatedNetwork

from tests.nursery import surroundings
from tests.processes.launch import Launch
from tests.update.server.test_socket_service import Faulty, events, until_lost

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
SOON_S = 200.0
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


PROGRAM = """
    import os, sys, torch, paceline
    from pathlib import Path
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = paceline.attach(model, optimizer)
    while not Path("enough").exists():
        optimizer.zero_grad()
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        Path(f"going.{run.world.rank}").touch()
    run.close()
"""


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(EmulatedNetwork.possible()), reason=EmulatedNetwork.possible())
def test_the_launchers_of_both_halves_end(tmp_path: Path) -> None:
    """That of the half without the launchers' store waited for it without a deadline."""
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "paceline", "run", "--hosts", "2", "--workers", "2", "--as-is", "--open"]
    with EmulatedNetwork(2) as network, contextlib.ExitStack() as stack:
        command += ["--master", f"{network.address(0)}:29500", "--rule", "asgd", "--timeout", "24", "--log", "logs"]
        launchers = []
        for host in range(2):
            said = stack.enter_context((tmp_path / f"host.{host}").open("wb"))
            one = subprocess.Popen(
                [*network.prefix(host), *command, "--host-index", str(host), "train.py"],
                env={**surroundings(), **network.environment(host)},
                cwd=tmp_path,
                stdout=said,
                stderr=said,
            )
            launchers.append(one)
            stack.callback(one.wait)
            stack.callback(one.terminate)
        until = time.monotonic() + SOON_S
        while not all((tmp_path / f"going.{rank}").exists() for rank in range(4)):
            assert time.monotonic() < until and all(one.poll() is None for one in launchers)
            time.sleep(0.05)
        network.cut(1)
        assert launchers[1].wait(SOON_S) not in (0, -signal.SIGABRT)
        said_by_1 = (tmp_path / "host.1").read_text()
        assert CUT_OFF in said_by_1 or "host 0 has not answered" in said_by_1, said_by_1
        (tmp_path / "enough").touch()
        assert launchers[0].wait(SOON_S) == 0, (tmp_path / "host.0").read_text()


@pytest.mark.slow  # the storms cut links
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
