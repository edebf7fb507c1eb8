# SPDX-License-Identifier: Apache-2.0
"""The laws on real processes over gloo, and the same bits as on virtual workers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.communication.base import WORDS
from paceline.communication.virtual.transport import VirtualTransport
from paceline.update.engine.blocks import outer_state
from tests.helpers import same_bits, simulate
from tests.processes.launch import Launch, run
from tests.processes.programs import RESUMED, SMALL, TABLE, numbers_for, program_of, with_rejected

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _chunks_as_in_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_state, "SMALL_ELEMENTS", SMALL)
    monkeypatch.setattr(outer_state, "SMALL_CODED", SMALL)
    monkeypatch.setattr(VirtualTransport, "coarse", 1)


def models(directory: Path, name: str, ranks: list[int]) -> list[dict[str, torch.Tensor]]:
    return [load_file(directory / f"{name}.{rank}.safetensors") for rank in ranks]


def assert_agree(states: list[dict[str, torch.Tensor]]) -> None:
    for state in states[1:]:
        assert same_bits(state, states[0])
    assert all(bool(torch.isfinite(v).all()) for v in states[0].values())


def meeting_bytes(workers: int) -> int:
    """Processes tell each other where they are."""
    return (workers - 1) * (8 * WORDS + len(json.dumps(socket.gethostname())))


def check_table(directory: Path, workers: int, hosts: int) -> None:
    """All ranks hold the same bits; reproducible recipes those of virtual workers; the traffic is the same, after
    `hosts` bytes for the meeting."""
    for number in numbers_for(workers):
        rule = TABLE[number][0]
        states = models(directory, str(number), list(range(workers)))
        sent = [int(s.pop("bytes")) for s in states]
        assert_agree(states)
        virtual = simulate(program_of(number), workers)
        final = {k.removeprefix("model."): v for k, v in states[0].items() if k.startswith("model.")}
        exported = {k.removeprefix("export."): v for k, v in states[0].items() if k.startswith("export.")}
        # a bias before BatchNorm has no gradient but rounding, which Adam blows up to the size of a step
        steady = final.keys() - {"0.bias", "1.running_mean"}
        assert same_bits(final, exported), rule
        assert sent == [out.bytes_sent + hosts for out in virtual], rule
        if "reproducible" in rule:
            assert same_bits(final, virtual[0].model), rule
        else:
            worst = max(float((final[k].double() - virtual[0].model[k].double()).abs().max()) for k in sorted(steady))
            assert worst < 1e-4, rule


@pytest.mark.claim
def test_two_processes(tmp_path: Path) -> None:
    """Recipes times laws, stop and resume, two runs one after another, a program that ends without close()."""
    run("two", 2, tmp_path)
    check_table(tmp_path, 2, meeting_bytes(2))
    for number in RESUMED:
        for rank in range(2):
            whole, second = (load_file(tmp_path / f"{n}.{number}.{rank}.safetensors") for n in ("whole", "second"))
            assert same_bits(whole, second)
    assert_agree(models(tmp_path, "ours", [0, 1]))
    assert_agree(models(tmp_path, "unclosed", [0, 1]))


@pytest.mark.slow  # two processes make the same calls in the fast tier
def test_four_processes(tmp_path: Path) -> None:
    """Recipes times laws, a sub-group of the user's, uneven data, nan, outliers, workers that do not agree."""
    ended = run("four", 4, tmp_path)
    check_table(tmp_path, 4, meeting_bytes(4))
    states = models(tmp_path, "group", [1, 3])
    assert_agree(states)
    for name in ("bmuf", "sync", "warm", "inner_ddp"):
        assert_agree(models(tmp_path, name, [0, 1, 2, 3]))
    for name in ("sync", "bmuf"):
        assert_agree(models(tmp_path, f"nan.{name}", [0, 1, 2, 3]))
        for rank in range(4):
            assert "inf or nan" in (tmp_path / f"nan.{name}.{rank}.error").read_text()
    assert "rank 1 on" in ended[0].err
    assert [(tmp_path / f"rejected.{rank}").read_text() for rank in range(4)] == ["[[1], [3]]"] * 4
    rejected = models(tmp_path, "rejected", [0, 1, 2, 3])
    assert_agree([*rejected, *simulate(with_rejected, 4)])
    for rank in range(4):
        shapes, rules = (tmp_path / f"mismatch.{rank}").read_text().splitlines()
        assert re.search(r"rank 2 on \S+ has weight of shape \(4, 2\)", shapes)
        assert re.search(r"rank 2 on \S+ bmuf\(period=5\)", rules)


@pytest.mark.parametrize(
    "rule",
    [
        "bmuf(period=2)",
        pytest.param("sync(reproducible=True)", marks=pytest.mark.slow),
        pytest.param("one_bit(warmup=0)", marks=pytest.mark.slow),
        pytest.param("bmuf(period=4, overlap=3, codec='int8')", marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_is_named_by_the_others(rule: str, tmp_path: Path) -> None:
    with Launch("endless", 4, tmp_path, rule, "600") as launch:
        for rank in range(4):
            launch.until(f"going.{rank}")
        began = time.monotonic()
        os.killpg(launch.processes[2].pid, signal.SIGKILL)
        ended = launch.wait([0, 1, 3], deadline_s=45)
        assert time.monotonic() - began < 45
        for rank in (0, 1, 3):
            text = (tmp_path / f"error.{rank}").read_text()
            assert ended[rank].code != 0
            assert re.search(r"rank 2 on \S+ did not answer", text), text
            assert f"rank {rank} of 4" in text
            assert not any(f"rank {other} on" in text.split("did not answer")[0] for other in (0, 1, 3)), text


def test_killing_rank_zero(tmp_path: Path) -> None:
    """The store goes with it; the others must still end soon, even where no worker can be named."""
    with Launch("endless", 3, tmp_path, "bmuf(period=2)", "600") as launch:
        for rank in range(3):
            launch.until(f"going.{rank}")
        os.killpg(launch.processes[0].pid, signal.SIGKILL)
        ended = launch.wait([1, 2], deadline_s=90)
        for rank in (1, 2):
            assert ended[rank].code != 0
            assert "PeerLostError" in ended[rank].err


@pytest.mark.parametrize(
    "rule",
    [
        "bmuf(period=2)",
        pytest.param("one_bit(warmup=0)", marks=pytest.mark.slow),
        "bmuf(period=4, overlap=3, codec='int8')",
    ],
)
def test_a_stopped_worker_is_named_after_the_deadline(rule: str, tmp_path: Path) -> None:
    """Also where threads wait in the background: the process ends all the same."""
    with Launch("endless", 4, tmp_path, rule, "5") as launch:
        for rank in range(4):
            launch.until(f"going.{rank}")
        os.killpg(launch.processes[1].pid, signal.SIGSTOP)
        ended = launch.wait([0, 2, 3], deadline_s=45)
        for rank in (0, 2, 3):
            text = (tmp_path / f"error.{rank}").read_text()
            assert ended[rank].code != 0
            assert re.search(r"rank 1 on \S+ did not answer", text), text


def test_an_error_of_the_users_on_one_worker_ends_all(tmp_path: Path) -> None:
    with Launch("raises", 4, tmp_path) as launch:
        ended = launch.wait(deadline_s=50)
    assert "the user's own" in ended[2].err and ended[2].code == 1
    for rank in (0, 1, 3):
        assert ended[rank].code != 0
        assert "PeerLostError" in ended[rank].err, ended[rank].err


@pytest.mark.parametrize(
    ("rule", "kept", "end"),
    [
        ("sync", "", "end"),
        ("bmuf(period=2)", "checkpoints", "one error"),
        ("bmuf(period=4, overlap=3, codec='int8')", "", "error"),
        ("asgd", "", "one error"),
    ],
)
def test_no_thread_outlives_a_program(rule: str, kept: str, end: str, tmp_path: Path) -> None:
    """One that comes back from native code while the interpreter ends makes a finished run end with SIGABRT."""
    with Launch("ends", 2, tmp_path, rule, kept, end) as launch:
        ended = launch.wait()
    codes = {"close": [0, 0], "end": [0, 0], "exit": [3, 3]}.get(end, [1, 1])
    if rule == "asgd" and end == "one error":  # the other one goes on
        codes = [0, 1]
    found = [one.code for one in ended.values()]
    if rule == "asgd" and end == "exit":  # the second one may learn first that the first is gone
        assert 3 in found and set(found) <= {1, 3}, launch.said()
    else:
        assert found == codes, launch.said()
    assert {(tmp_path / f"threads.{rank}").read_text() for rank in range(2)} == {"MainThread"}
