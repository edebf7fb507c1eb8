# SPDX-License-Identifier: Apache-2.0
"""Two to four processes that share one GPU over a gloo group of the user's: tensors cross through host memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.ports import free_port

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), pytest.mark.processes]

PROGRAM = """
import torch, torch.distributed as dist, paceline
from torch import nn

dist.init_process_group("gloo")
RULES = [
    ("bmuf(period=3)", "device"),
    ("bmuf(period=3)", "host"),
    ("sync", "device"),
    ("sync(reproducible=True)", "device"),
    ("one_bit(warmup=2)", "device"),
    ("diloco(period=4, overlap=2)", "device"),
    ("diloco(period=4, overlap=2, codec='int8')", "device"),
    ("averaging(period=3, codec='top_k(ratio=0.1)')", "device"),
]
for rule, where in RULES:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.attach(model, optimizer, rule, outer_state=where, timeout_s=60) as run:
        torch.manual_seed(run.world.rank)
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(16, 8, device="cuda")).square().mean().backward()
            optimizer.step()
    total = torch.cat([t.double().flatten() for t in model.state_dict().values()]).cpu()
    every = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(every, total)
    assert all(torch.equal(one, total) for one in every) and total.isfinite().all(), rule
print("alike")
"""


@pytest.mark.parametrize("kernels", ["1", "0"])
@pytest.mark.parametrize("workers", [2, 4])
def test_processes_end_with_the_same_bits(workers: int, kernels: str) -> None:
    shared = {**os.environ, "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared["PACELINE_TRITON"] = kernels
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    started = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(workers)
    ]
    try:
        assert [worker.communicate(timeout=300)[0].strip() for worker in started] == ["alike"] * workers
    finally:
        for worker in started:
            worker.kill()
