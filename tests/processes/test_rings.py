# SPDX-License-Identifier: Apache-2.0
"""`transport="channel"` on real processes: what gloo gives, and who is named when a process dies or stands still."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.communication.test_tls import Authority
from tests.processes.launch import Launch, run
from tests.processes.ring_programs import RULES

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_the_same_model_as_over_gloo(tmp_path: Path) -> None:
    Authority(tmp_path, "job").worker("worker")
    run("same", 2, tmp_path, str(tmp_path / "job" / "worker"), module="ring_programs")
    for name in RULES:
        gloo = load_file(tmp_path / f"auto.{name}.clear.safetensors")
        for how in ("clear", "tls"):
            ring = load_file(tmp_path / f"channel.{name}.{how}.safetensors")
            for key, value in gloo.items():
                if name.startswith("ordered"):
                    assert torch.equal(ring[key], value), (name, key)
                torch.testing.assert_close(ring[key], value)


@pytest.mark.parametrize(("fault", "timeout_s", "says"), [("KILL", "60", "is lost"), ("STOP", "4", "did not answer")])
def test_a_process_that_is_lost_is_named_by_the_others(fault: str, timeout_s: str, says: str, tmp_path: Path) -> None:
    with Launch("lost", 3, tmp_path, timeout_s, module="ring_programs") as launch:
        for rank in range(3):
            launch.until(f"ready.{rank}")
        os.killpg(launch.processes[1].pid, getattr(signal, f"SIG{fault}"))
        ended = launch.wait([0, 2])
        for rank in (0, 2):
            assert ended[rank].code == 0, launch.said()
            assert "rank 1 on" in ended[rank].out and says in ended[rank].out, ended[rank].out
            assert "rank 0 on" not in ended[rank].out.split("Look at")[0], ended[rank].out
            assert "rank 2 on" not in ended[rank].out.split("Look at")[0], ended[rank].out
