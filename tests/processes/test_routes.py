# SPDX-License-Identifier: Apache-2.0
"""Channels, parts, messages and routes on real processes over gloo, against virtual workers."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.communication import virtual
from paceline.core.world import host_name
from tests.processes.launch import Launch, run
from tests.processes.route_programs import ROUTES, numbers, operations, parts, summed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def imitate(workers: int, what: Any) -> list[Any]:
    """`what(transport)` on virtual workers, as JSON would bring it back."""

    def body() -> Any:
        transport = virtual.current()
        assert transport is not None
        return json.loads(json.dumps(what(transport)))

    return list(virtual.run(workers, body))


def test_operations_channels_and_parts(tmp_path: Path) -> None:
    run("all_of_it", 4, tmp_path, module="route_programs")
    said = [json.loads((tmp_path / f"said.{rank}").read_text()) for rank in range(4)]
    everybody, among_three = imitate(4, operations), imitate(3, operations)
    assert [s["all"] for s in said] == everybody
    for rank in range(4):
        channel = {name: row[:-1] for name, row in said[rank]["channel"].items()}
        assert channel == {name: row[:-1] for name, row in everybody[rank].items()}
        assert [row[-1] for row in said[rank]["channel"].values()] == [row[-1] for row in everybody[rank].values()]
    assert [s["users"] for s in said[1:]] == among_three
    hosts = said[0]["parts"][0][3][:1]
    assert [s["parts"] for s in said] == json.loads(json.dumps(imitate(4, parts)).replace(host_name(), hosts[0]))
    assert [s["parts"][0][4] for s in said] == [101.0, 1010.0, 101.0, 1010.0]
    for s in said:
        assert s["threads"][:-1] == [4.0 * sum(number + k for number in range(20)) for k in range(6)]
        assert len(s["closed"]) == 3 and all("was closed before" in text for text in s["closed"])
        assert s["threads"][-1] == 6 * 20 * 2 * 3 * 4000 // 4


def test_the_hierarchical_route(tmp_path: Path) -> None:
    """The flat sum, on all the same; in rank order the bits of virtual workers; the bytes of the formula."""
    run("hierarchical", 4, tmp_path, module="route_programs")
    want = sum(numbers(1000, rank).double() for rank in range(4))
    exact = sum((numbers(1000, rank) * 1e3).long() for rank in range(4))
    for number, (dimensions, hosts, ordered) in enumerate(ROUTES):
        found = [load_file(tmp_path / f"{number}.{rank}.safetensors") for rank in range(4)]
        for one in found:
            assert all(torch.equal(one[k], found[0][k]) for k in ("0", "1", "2"))
            for k in ("0", "2"):
                torch.testing.assert_close(one[k].double(), want, rtol=1e-5, atol=1e-2)
            assert torch.equal(one["1"], exact)
        if ordered:
            here = virtual.run(4, lambda d=dimensions: summed(virtual.current(), d, True), hosts)
            for one, other in zip(found, here, strict=True):
                assert all(torch.equal(one[str(k)], x) for k, x in enumerate(other))


@pytest.mark.slow  # test_gloo.py kills one
def test_a_worker_killed_while_channels_are_in_use(tmp_path: Path) -> None:
    """All threads of all survivors hear of it at once, though the deadline is a minute away."""
    with Launch("endless", 4, tmp_path, "60", module="route_programs") as launch:
        for rank in range(4):
            for number in range(5):
                launch.until(f"going.{rank}.{number}")
        os.killpg(launch.processes[2].pid, signal.SIGKILL)
        launch.wait([0, 1, 3], deadline_s=50)
        for rank in (0, 1, 3):
            said = (tmp_path / f"error.{rank}").read_text().splitlines()
            lines = [line for line in said if "did not answer" in line]  # below each is a table of who waits for whom
            assert len(lines) == 6, launch.said()  # four channels, the part, and what came after
            for line in lines:
                assert re.search(r"rank 2 on \S+ did not answer", line), line
                assert not any(f"rank {other} on" in line.split("did not answer")[0] for other in (0, 1, 3)), line


@pytest.mark.slow
def test_a_message_that_nobody_sends(tmp_path: Path) -> None:
    run("silent", 2, tmp_path, module="route_programs")
    assert re.search(r"receive from rank 1 on \S+, deadline 3 s", (tmp_path / "error.0").read_text())
    assert (tmp_path / "error.1").exists()


@pytest.mark.slow
def test_a_worker_that_does_not_come_to_open_a_channel(tmp_path: Path) -> None:
    run("absent", 2, tmp_path, module="route_programs")
    assert re.search(r"opening \S+channel1.* rank 1 on \S+ did not answer", (tmp_path / "error.0").read_text())


def test_a_connection_that_closes_does_not_wait_for_its_operations(tmp_path: Path) -> None:
    with Launch("dropped", 2, tmp_path, module="route_programs") as launch:
        assert all(one.code == 0 for one in launch.wait(deadline_s=60).values()), launch.said()


@pytest.mark.parametrize("lost", ["", "lost"])
def test_an_operation_ends_with_the_connection(lost: str, tmp_path: Path) -> None:
    """Its deadline is ten minutes away; and gloo may lose the end of an operation when a peer dies."""
    with Launch("unending", 3, tmp_path, lost, module="route_programs") as launch:
        assert all(one.code == 0 for one in launch.wait(deadline_s=60).values()), launch.said()
    said = (tmp_path / "error.1").read_text()
    assert re.search(r"rank 2 on \S+ did not come", said) and ("failed elsewhere" in said) == bool(lost)
    assert (tmp_path / "error.0").exists()
