# SPDX-License-Identifier: Apache-2.0
"""Processes whose tensors lie on a device, over gloo, which takes host memory; the device is that of `tests.device`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

PROGRAM = """
import sys
import torch, paceline
from torch import nn
from paceline.core import runtime
from tests.device import NAME, Device

plain = runtime.thread
def thread(target, name, args=()):
    def entered(*given):
        with Device():
            target(*given)
    return plain(entered, name, args)
runtime.thread = thread

def train(rule, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with paceline.attach(model, optimizer, rule, timeout_s=60) as run:
        generator = torch.Generator().manual_seed(run.world.rank)
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(16, 8, generator=generator).to(device)).square().mean().backward()
            optimizer.step()
    return [getattr(t.detach(), "host", t.detach()).clone() for t in model.state_dict().values()]

for rule in sys.argv[1:]:
    with Device():
        ours = train(rule, NAME)
    for one, other in zip(ours, train(rule, "cpu"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
print("alike")
"""
RULES = ["bmuf(period=3)", "diloco(period=4, overlap=2, codec='int8')", "sync", "sync(reproducible=True)", "one_bit"]


@pytest.mark.slow  # tests/update/test_device.py without processes
@pytest.mark.processes
def test_what_travels_through_host_memory_arrives_on_the_device() -> None:
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", PROGRAM, *RULES]
    workers = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        assert [worker.communicate(timeout=150)[0].strip() for worker in workers] == ["alike", "alike"]
    finally:
        for worker in workers:
            worker.kill()
