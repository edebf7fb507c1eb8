# SPDX-License-Identifier: Apache-2.0
"""A training of the counting model, with the places at which it may be killed.

paceline run ... program.py JOB.json
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from devtools.counting.job import Job, read
from devtools.counting.points import Points, in_worker, living
from devtools.storm.counting import Counting

import paceline

HOLD_S = 60.0
LOOK_S, SLOW_S = 0.01, 0.2
ENTERING = ("attach", "holds", "take", "give", "resume", "loaded", "resumed")


class Program:
    """The program.

    Args:
        job: of the run.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.points = job, Points(job)
        in_worker(self.points)
        (job.pids / str(os.getpid())).touch()
        self.model = Counting(job.samples, job.epochs, job.exchanges)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        kept: dict[str, Any] = {"checkpoint": job.checkpoint, "every_blocks": job.every_blocks, "keep": job.keep}
        self.run = paceline.attach(
            self.model, self.optimizer, job.rule, timeout_s=job.timeout_s, **(kept if job.checkpoint else {})
        )
        self.points.at("attach")
        members = self.run._parts.membership
        self.worker = members.control.worker if members is not None else self.run.world.rank
        self.share = self.run.share(DataLoader(list(range(job.samples)), job.batch, shuffle=True))  # type: ignore[arg-type]
        if job.checkpoint:
            self.run.resume()
            self.points.at("resumed")

    def train(self) -> None:
        """To the end of all epochs."""
        for epoch in range(self.run.epoch, self.job.epochs):
            for ids in self.share:
                self.step(ids, epoch)
        self.points.at("leave")
        self.run.close()
        final = self.job.finals / f"{self.worker}-{os.getpid()}.safetensors"
        save_file({name: x.detach().contiguous() for name, x in self.model.named_parameters()}, f"{final}.part")
        os.replace(f"{final}.part", final)

    def step(self, ids: torch.Tensor, epoch: int) -> None:
        """One minibatch."""
        self.hold()
        self.points.exchange = self.run.blocks
        self.model.count(ids, epoch, self.worker, self.run.blocks)
        self.points.at("step")
        self.optimizer.step()
        self.points.exchange = self.run.blocks
        self.points.at("stepped")

    def hold(self) -> None:
        """Until as many workers are there as the run is to have: a fresh process takes longer than the training."""
        armed = self.points.armed
        if armed is not None and armed[1].point in ENTERING:
            time.sleep(SLOW_S)  # else the training is over before a newcomer is there
        until = time.monotonic() + HOLD_S
        while self.points.armed is not None and len(living(self.job)) < self.job.workers:
            if time.monotonic() > until:
                raise SystemExit(f"{len(living(self.job))} of {self.job.workers} workers are there after {HOLD_S:g} s")
            time.sleep(LOOK_S)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Program(read(sys.argv[1])).train()
