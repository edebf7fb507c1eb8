# SPDX-License-Identifier: Apache-2.0
"""The storm's model under torchft's DiLoCo, with its lighthouse and its managers.

    python torchft_program.py JOB.json GROUP GROUPS       TORCHFT_LIGHTHOUSE says where the lighthouse is

A group is one worker. torchft leaves the data to its user: a worker's samples are those of its group, as torchft's own
DistributedSampler gives them, and it goes on where its group stood at the last commit, which we write to a file after
every one: more than torchft's examples do. What it computes after a commit that failed is gone, as torchft says.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "examples" / "char_lm"), str(HERE.parent)]  # both have a data.py

from model import CharLM  # noqa: E402
from torchft import Manager, ProcessGroupGloo  # noqa: E402
from torchft.local_sgd import DiLoCo  # noqa: E402

from _faults.books import Book, Samples, learning_rate  # noqa: E402
from _faults.job import Job, read  # noqa: E402

LARGEST_GRADIENT = 0.5


class Trainer:
    """The program."""

    def __init__(self, job: Job, group: int, groups: int) -> None:
        self.job, self.group, self.groups = job, group, groups
        torch.manual_seed(job.seed)
        self.model = CharLM(job.hidden)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=job.lr)
        self.outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        address = os.environ["ADDRESS"]
        self.store = store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        timeout = timedelta(seconds=job.timeout_s)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=self.load,
            state_dict=self.state,
            min_replica_size=2,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=store.port,
            replica_id=f"group{group}_",
            hostname=address,
        )
        self.place = Path(job.books) / f"place-{group}"
        self.step = int(self.place.read_text()) if self.place.exists() else 0
        self.book = Book(Path(job.books), int(os.environ["WORKER"]))
        self.book.write("started", pid=os.getpid(), host=socket.gethostname(), block=0)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "inner": self.inner.state_dict(),
            "outer": self.outer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self.outer.load_state_dict(state["outer"])

    def train(self) -> None:
        data = Samples(load_file(self.job.corpus)["train"], self.job)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1)).tolist()
        own = order[self.group :: self.groups]
        made, begun = 0, time.monotonic()
        with DiLoCo(self.manager, [self.model], self.inner, self.outer, sync_every=self.job.period):
            while (self.step + 1) * self.job.batch <= len(own):
                ids, inputs, targets = data.__getitems__(own[self.step * self.job.batch :][: self.job.batch])
                for group in self.inner.param_groups:
                    group["lr"] = self.job.lr * learning_rate(self.step * self.job.batch / len(own))
                self.inner.zero_grad()
                self.model.loss(inputs, targets).backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
                time.sleep(max(0.0, begun + self.job.minibatch_s - time.monotonic()))
                self.step, made = self.step + 1, made + 1
                self.book.write("step", step=self.step, ids=ids.tolist())
                before = self.manager.current_step()
                self.inner.step()
                if made == self.job.period:
                    self.synced(before, made)
                    made = 0
                begun = time.monotonic()
        self.book.write("through")
        self.manager.shutdown(wait=False)
        os._exit(0)

    def synced(self, before: int, made: int) -> None:
        """What the sync has done: whether it was committed, and whether this worker's block is in it."""
        after = self.manager.current_step()
        digest = hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in self.model.parameters())).hexdigest()
        self.book.write(
            "synced",
            before=before,
            after=after,
            in_it=self.manager.is_participating(),
            size=self.manager.num_participants(),
            failed=str(self.manager.errored() or "")[:200],
            step=self.step,
            made=made,
            digest=digest,
        )
        if after > before:
            self.place.write_text(str(self.step))


def main() -> None:
    torch.set_num_threads(1)
    Trainer(read(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])).train()


if __name__ == "__main__":
    main()
