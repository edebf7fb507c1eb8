# SPDX-License-Identifier: Apache-2.0
"""`seeds/peers.py`: its columns on a case solved by hand; processes that meet, count and end on emulated hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmarks.common._network import EmulatedNetwork

import paceline

from .modules import FOLDER, imported

needs_root = pytest.mark.skipif(bool(EmulatedNetwork.possible()), reason=EmulatedNetwork.possible())
NOTHING = {"seconds": 1.0, "processor_s": 0.1, "sent_bytes": 0, "idle": 0.9, "timed_steps": 10, "counted_steps": 20}


@pytest.fixture(scope="module")
def figures() -> Any:
    with imported("_peers.figures") as modules:
        yield modules["_peers.figures"]


def counted(**changes: Any) -> dict[str, Any]:
    """What a worker counted in ten timed and twenty counted steps, two blocks."""
    return NOTHING | {"exchanges": 2.0} | changes


def test_columns_are_beyond_those_of_the_row_without_exchanges(figures: ModuleType) -> None:
    nothing = figures.of_run([counted(exchanges=20.0)] * 2)
    row = figures.of_run(
        [
            counted(seconds=2.0, processor_s=0.3, sent_bytes=4_000_000),
            counted(seconds=3.0, processor_s=0.5, sent_bytes=8_000_000),
        ]
    )
    assert figures.against(row, nothing) == pytest.approx(
        {
            "step_ms": 240.0,  # 5 steps a second and 3 1/3
            "exposed_ms": 1400.0,  # 140 ms a step, ten steps between exchanges
            "processor_ms": 150.0,  # 0.4 s - 0.1 s for two exchanges
            "sent_mb": 0.3,  # 6 MB in twenty steps
            "idle": 0.9,
            "exchanges": 0.1,
        }
    )


def test_medians_are_over_rounds_and_a_row_without_an_exchange_says_so(figures: ModuleType) -> None:
    nothing = figures.of_run([counted(exchanges=20.0)])
    rounds = [
        {
            "no_exchange": nothing,
            "ddp": figures.of_run([counted(seconds=s)]),
            "none": figures.of_run([counted(exchanges=0)]),
        }
        for s in (2.0, 9.0, 3.0)
    ]
    found = figures.medians(rounds)
    assert found["ddp"]["step_ms"] == 300.0
    assert found["none"]["exposed_ms"] is None
    assert "none made" in figures.table(found)


PROGRAM = """
import json, os, socket, sys, tempfile, time
from pathlib import Path
sys.path[:0] = sys.argv[1:]
from _network import EmulatedNetwork
from _peers.counters import processor_s, processes_in, sent_bytes
from _peers.fleet import Fleet, RowError

SENT = 300_000

def talk(place):
    server = socket.create_server((place.address, 5000))
    addresses = place.meet(place.address)
    before, busy = sent_bytes("eth0"), processor_s()
    if place.rank == 0:
        with socket.create_connection((addresses[1], 5000)) as peer:
            peer.sendall(bytes(SENT))
        while processor_s() < busy + 0.05:
            pass
    elif place.rank == 1:
        peer, _ = server.accept()
        while peer.recv(1 << 16):
            pass
    place.meet()
    found = [sent_bytes("eth0") - before, processor_s() - busy, addresses, place.service]
    place.meet()
    return found

def raises(place):
    if place.rank == 1:
        raise ValueError("no")
    place.meet()

def dies(place):
    if place.rank == 1:
        print("farewell", file=sys.stderr, flush=True)
        os._exit(1)
    place.meet()

def hangs(place):
    if place.rank == 1:
        time.sleep(1000)
    place.meet()

def error_of(fleet, work):
    try:
        fleet.run(work)
    except RowError as error:
        return str(error)

with EmulatedNetwork(3, 1000.0) as network, tempfile.TemporaryDirectory() as folder:
    fleet = Fleet(network, 2, Path(folder), 20.0)
    talked = fleet.run(talk, lambda place: (None, place.address))
    left = len(list(processes_in(fleet._inodes)))
    short = Fleet(network, 2, Path(folder), 1.0)
    errors = [error_of(fleet, raises), error_of(fleet, dies), error_of(short, hangs)]
    print(json.dumps({"talked": talked, "left": left, "errors": errors}))
"""


@needs_root
@pytest.mark.network
def test_workers_meet_count_for_themselves_and_are_named_when_they_fail(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    source = str(Path(paceline.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(program), str(FOLDER / "seeds"), str(FOLDER / "common")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": source, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (sent, busy, addresses, service), (back, idle, _, _) = found["talked"]
    assert 300_000 < sent < 330_000  # the headers, too
    assert back < 30_000  # acknowledgements
    assert 0.05 <= busy > idle
    assert len({*addresses, service}) == 3
    assert found["left"] == 0
    raised, died, hung = found["errors"]
    assert raised == "rank 1: ValueError: no"
    assert "rank 1 died" in died and "farewell" in died
    assert "rank 1 was not done within 1 s" in hung
