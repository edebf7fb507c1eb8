# SPDX-License-Identifier: Apache-2.0
"""Two processes that share one GPU over a gloo group of the user's: tensors cross through host memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.ports import free_port

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.processes,
]

PROGRAM = """
import torch, torch.distributed as dist, paceline
from torch import nn

dist.init_process_group("gloo")
for rule, where in [("bmuf(period=3)", "device"), ("bmuf(period=3)", "host"), ("sync(reproducible=True)", "device")]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.attach(model, optimizer, rule, outer_state=where, timeout_s=60) as run:
        torch.manual_seed(run.world.rank)
        for _ in range(7):
            optimizer.zero_grad()
            model(torch.randn(16, 8, device="cuda")).square().mean().backward()
            optimizer.step()
    total = torch.cat([t.double().flatten() for t in model.state_dict().values()]).cpu()
    both = [torch.empty_like(total) for _ in range(2)]
    dist.all_gather(both, total)
    assert torch.equal(*both), rule
print("alike")
"""


def test_two_processes_end_with_the_same_bits() -> None:
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    workers = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        assert [worker.communicate(timeout=120)[0].strip() for worker in workers] == ["alike", "alike"]
    finally:
        for worker in workers:
            worker.kill()
