# SPDX-License-Identifier: Apache-2.0
"""The training program of the storm: a character model that tells which worker's minibatches went into it.

    paceline run ... program.py JOB.json        a worker
    python program.py JOB.json resume           loads the newest whole step of the job's checkpoints, and says which

A buffer of the model, which exchanges average with the weights m_i / M (m_i minibatches of worker i, M of all), says
who took part. At its step s a worker adds to the places of the coming exchange and of itself

    1 / m_i     s / m_i     1

so that exchange number b adds 1 / M, s / M and m_i / M there for each worker i whose block is in the mean: its
minibatches s - m_i + 1 .. s are in the model. Which samples these were, the worker has written to its file before the
step, and a file outlives a killed process. There are places for eight exchanges, because a worker that waits may come
to several before it looks.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import paceline

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "examples" / "char_lm"), str(HERE.parent)]

from model import CharLM  # noqa: E402

from _faults.books import Book, Samples, learning_rate  # noqa: E402
from _faults.job import LAPS, PLACES, Job, read  # noqa: E402
from data import keep_batch  # noqa: E402

LARGEST_GRADIENT = 0.5
HOLD_S = 0.005  # between two looks for a file


class Counted(nn.Module):
    """The model, and the buffer that tells who took part, averaged as running statistics are: (3, LAPS, PLACES)."""

    averages_buffers = True
    tags: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = CharLM(hidden)
        self.register_buffer("tags", torch.zeros(3, LAPS, PLACES, dtype=torch.float64))


class Program:
    """The program."""

    def __init__(self, job: Job) -> None:
        self.job = job
        torch.manual_seed(job.seed)
        self.model = Counted(job.hidden)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=job.lr)
        saved = {"checkpoint": job.checkpoint, "every_blocks": job.every_blocks} if job.checkpoint else {}
        self.run = paceline.attach(
            self.model, self.optimizer, job.rule, timeout_s=job.timeout_s, seed=job.seed, **saved
        )
        members = self.run._parts.membership
        self.book = Book(Path(job.books), members.control.worker if members is not None else self.run.world.rank)
        self.steps, self.made, self.block = 0, 0, self.run.blocks
        self.start = self.model.tags.clone()
        self.book.write("started", pid=os.getpid(), host=socket.gethostname(), block=self.block)

    def train(self) -> None:
        """The usual loop, and the books."""
        data = Samples(load_file(self.job.corpus)["train"], self.job)
        loader = DataLoader(data, self.job.batch, shuffle=True, collate_fn=keep_batch)
        share = self.run.share(loader)
        scheduler = LambdaLR(self.optimizer, lambda step: learning_rate(share.progress))
        begun = time.monotonic()
        for ids, inputs, targets in share:
            self.look()
            self.optimizer.zero_grad()
            self.model.net.loss(inputs, targets).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
            time.sleep(max(0.0, begun + self.job.minibatch_s - time.monotonic()))
            self.hold()
            self.note(ids)
            self.optimizer.step()
            self.look()
            scheduler.step()
            begun = time.monotonic()
        self.look()
        self.book.write("through")
        self.run.close()
        self.look()
        self.leave_model()

    def hold(self) -> None:
        """Where a file says so, do not come to the end of this block while it is there."""
        path = self.book.directory / f"hold-{self.book.worker}"
        if path.exists() and self.made + 1 == self.job.period:
            self.book.write("holds")
            while path.exists():
                time.sleep(HOLD_S)

    def note(self, ids: Tensor) -> None:
        """Before a step: which samples it has, in the file and in the buffer."""
        self.steps, self.made = self.steps + 1, self.made + 1
        self.book.write("step", step=self.steps, ids=ids.tolist())
        lap = (self.run.blocks + 1) % LAPS
        own = torch.tensor([1 / self.made, self.steps / self.made, 1.0], dtype=torch.float64)
        with torch.no_grad():
            self.model.tags.copy_(self.start)
            self.model.tags[:, lap, self.book.worker % PLACES] += own
            if self.book.asked("poison"):
                self.book.write("poisoned", step=self.steps)
                self.model.net.output.bias.fill_(float("nan"))

    def look(self) -> None:
        """Write down what exchanges have added since the last look."""
        if self.run.blocks == self.block:
            return
        first, self.block = self.block + 1, self.run.blocks
        before, self.start, self.made = self.start, self.model.tags.clone(), 0
        added = self.start - before
        laps, places = (added[0].abs() > 1e-12).nonzero(as_tuple=True)
        rows = [(k, w, *added[:, k, w].tolist()) for k, w in zip(laps.tolist(), places.tolist(), strict=True)]
        self.book.write("exchanged", first=first, last=self.block, added=rows, size=self.run.world.size)

    def leave_model(self) -> None:
        """The global model, and its digest."""
        state = {name: x.contiguous() for name, x in self.model.state_dict().items()}
        digest = hashlib.sha256(b"".join(x.numpy().tobytes() for x in state.values())).hexdigest()
        save_file(state, self.book.directory / f"final-{self.book.worker:03d}.safetensors")
        self.book.write("ended", digest=digest, block=self.run.blocks)


def resume(job: Job) -> None:
    """What a new start finds in the checkpoints."""
    model = Counted(job.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr)
    log = Path(f"{job.checkpoint}-log")
    run = paceline.attach(model, optimizer, job.rule, log=log, seed=job.seed, checkpoint=job.checkpoint, keep=3)
    data = Samples(load_file(job.corpus)["train"], job)
    run.share(DataLoader(data, job.batch, shuffle=True, collate_fn=keep_batch))
    found = run.resume()
    events = [json.loads(line) for path in log.glob("rank-*.jsonl") for line in path.read_text().splitlines()]
    taken = [Path(event["path"]).name for event in events if event["kind"] == "resume"]
    print("RESUMED", json.dumps({"found": bool(found), "step": taken[-1] if taken else ""}), flush=True)
    os._exit(0)  # this start is over before it has trained anything


def main() -> None:
    torch.set_num_threads(1)
    job = read(Path(sys.argv[1]))
    if sys.argv[2:] == ["resume"]:
        resume(job)
    Program(job).train()


if __name__ == "__main__":
    main()
