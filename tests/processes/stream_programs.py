# SPDX-License-Identifier: Apache-2.0
"""What the processes of tests/data run: `python -m tests.processes.stream_programs NAME DIRECTORY RULE`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data import ShardStream, json_lines
from tests.processes.together import run_named

RANK = int(os.environ.get("RANK", "0"))
KILLED, KILLED_AT = 1, 7


def train(directory: Path, rule: str, processes: str, killed: str) -> None:
    """Two epochs of a stream, a step a batch; what a worker sees is written down at once."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    stream = ShardStream(json_lines(sorted(directory.glob("*.jsonl"))))
    with paceline.attach(model, optimizer, rule, timeout_s=60) as run, (directory / f"seen.{RANK}").open("w") as seen:
        shared = run.share(DataLoader(stream, 4, num_workers=int(processes)))
        steps = 0
        for _ in range(2):
            epoch = shared.epoch
            for batch in shared:
                print(json.dumps([epoch, batch.tolist()]), file=seen, flush=True)
                optimizer.zero_grad()
                model(batch.float().view(-1, 1)).mean().backward()
                optimizer.step()
                steps += 1
                if int(killed) and RANK == KILLED and steps == KILLED_AT:
                    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run_named(globals(), *sys.argv[1:])
