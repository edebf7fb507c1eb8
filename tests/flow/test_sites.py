# SPDX-License-Identifier: Apache-2.0
"""Two sites behind routers: workers that joined with an invitation train every sample once, whatever the link does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from devtools.emulation import EmulatedNetwork, SitesNetwork

from tests.flow.program import counted
from tests.paths import python_path

DEADLINE_S = 150.0
EPOCHS, SAMPLES = 2, 400
PROGRAM = Path(__file__).with_name("program.py")
pytestmark = [
    pytest.mark.network,
    pytest.mark.processes,
    pytest.mark.skipif(bool(EmulatedNetwork.possible()), reason=EmulatedNetwork.possible()),
]
ECHO = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("ready", flush=True)
    while True:
        sock, (address, _) = server.accept()
        sock.sendall(address.encode())
        sock.close()
"""
ASK = """
import socket, sys
try:
    print(socket.create_connection((sys.argv[1], 5000), timeout=3).recv(100).decode())
except OSError as error:
    print("no")
"""


def ask(network: SitesNetwork, host: int, address: str) -> str:
    """As which address a host is seen there; "no" if it gets no connection."""
    command = [*network.prefix(host), sys.executable, "-c", ASK, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout.strip()


@pytest.mark.slow
def test_a_site_is_seen_by_its_router_s_address_and_nobody_gets_in() -> None:
    with SitesNetwork(sites=2, rate_mbit=100, delay_ms=1) as network, contextlib.ExitStack() as stack:
        for host in (0, 1):
            command = [*network.prefix(host), sys.executable, "-c", ECHO]
            listening = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(listening.kill)
            assert listening.stdout is not None and listening.stdout.readline() == "ready\n"
        public = network.address(0)
        assert [ask(network, host, public) for host in (1, 2)] == [network.address(1), network.address(2)]
        assert ask(network, 1, "192.168.1.2") == "192.168.1.2"  # itself
        assert [ask(network, host, network.address(1)) for host in (0, 2)] == ["no", "no"]
        assert [ask(network, host, "192.168.1.2") for host in (0, 2)] == ["no", "no"]
        network.cut(1)
        assert [ask(network, host, public) for host in (1, 2)] == ["no", network.address(2)]
        network.mend(1)
        assert ask(network, 1, public) == network.address(1)


class Run:
    """An elastic run of the sites."""

    def __init__(self, directory: Path, network: SitesNetwork) -> None:
        self.directory, self.network, self.books = directory, network, directory / "books"
        self.books.mkdir()
        phase = {"books": str(self.books), "samples": SAMPLES, "epochs": EPOCHS, "pause": 0.02, "timeout": 40.0}
        self.phase = directory / "phase.json"
        self.phase.write_text(json.dumps(phase))
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self, host: int, *arguments: object) -> None:
        """A launcher."""
        with (self.directory / f"{host}.txt").open("wb") as out:
            command = [*self.network.prefix(host), sys.executable, "-m", "paceline", *map(str, arguments)]
            environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
            self.launchers.append(
                subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=self.directory)
            )

    def events(self, kind: str) -> int:
        """How many there were of a kind."""
        path = self.directory / "lead" / "control.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return sum(json.loads(line)["kind"] == kind for line in lines)

    def until(self, what: Callable[[], object]) -> None:
        """Wait for something."""
        end = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < end and not any(one.poll() for one in self.launchers), self.said()
            time.sleep(0.05)

    def exchanged(self) -> int:
        """Lines in the books."""
        return sum(len(path.read_text().splitlines()) for path in self.books.iterdir())

    def said(self) -> list[str]:
        return [path.read_text(errors="replace")[-2000:] for path in sorted(self.directory.glob("*.txt"))]


@pytest.mark.slow  # the storms cut links, and records/2026-11-26_sites
@pytest.mark.timeout(400)
def test_every_sample_counts_once_while_a_site_s_link_is_cut_twice(tmp_path: Path) -> None:
    """The first cut is survived; by the second one the worker is lost, and a fresh one takes its place."""
    with SitesNetwork(sites=2, rate_mbit=20, delay_ms=10) as network:
        run = Run(tmp_path, network)
        try:
            where, door = f"{network.address(0)}:29700", tmp_path / "lead" / "certificates" / "invitation"
            lead = ("--elastic", "2:2", "--workers", 0, "--listen", where, "--invite", "--timeout", 40, "--log", "lead")
            run.start(0, "run", *lead)
            run.until(lambda: door.exists() and door.read_text().endswith("\n"))
            for site in (1, 2):
                run.start(site, "join", "--log", f"site-{site}", door, PROGRAM, run.phase)
            for seconds, more in ((1.0, 4), (12.0, 4)):
                before = run.exchanged()
                run.until(lambda before=before, more=more: run.exchanged() >= before + more)  # type: ignore[misc]
                network.cut(1)
                time.sleep(seconds)  # the fault itself
                network.mend(1)
            codes = [launcher.wait(DEADLINE_S) for launcher in run.launchers]
        finally:
            for launcher in run.launchers:
                launcher.kill()
                launcher.wait()
    assert codes == [0, 0, 0], run.said()
    assert run.events("lost") >= 1, "the second cut is longer than a worker may be silent"
    counts = counted(run.books, SAMPLES)
    assert torch.allclose(counts, torch.full_like(counts, EPOCHS), atol=1e-6), counts.unique(return_counts=True)
