# SPDX-License-Identifier: Apache-2.0
"""A model that counts under asynchronous rules: how often each sample of each epoch is in each shard of the parameters.

The parameters are as many rows as there are shards, each with a number for every sample of every epoch. A minibatch's
gradient is -1 at its samples, in every row, and the owners' plain SGD has a rate of 1: so each row counts, and a push
that is in one shard and not in another shows. Under `dc_asgd` the compensation is g g (theta - theta_pulled), which is
0 at a sample that nobody else has pushed since; its strength is small, so that rounding tells the count in any case.

Workers are forked from a process that has imported everything, and killed with SIGKILL at places of the program:

    step  stepped      a worker before and after its optimizer's step
    torn               a worker that has sent its push to some owners and not to others
    applied answered   an owner that has applied a push, before and after the answer, and not replicated it
    sends  kept  told  an owner before it sends a replica, before it says that the successor has it, and after
    done               the keeper of the ledger, when it hears that places are done
    heir  takeover     the successor, before and after it takes slices over
    dry  finish  part  a worker that has nothing to do, that ends, that has the final model
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from devtools.counting.kill_points import KillPoints
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.rules.topology import Sharded
from paceline.update.server import peer
from paceline.update.server.durability import Durability, Replicas
from paceline.update.server.ledger_client import SocketLedgerClient
from paceline.update.server.membership import StallDetector
from paceline.update.server.protocol import FrameKind
from paceline.update.server.socket_service import PeerServer, SocketService

UNIT = 64


@dataclass(frozen=True)
class Death:
    """A SIGKILL: `rank` dies when it has come to `point` for the `nth` time."""

    rank: int
    point: str
    nth: int = 1


@dataclass
class Pushes:
    """One run.

    Attributes:
        rule: of the run; every owner has `rows` shards.
        workers, samples, batch, epochs: of the training.
        deaths: that are planned.
        pauses: seconds that each rank takes for a minibatch; the last for all further ranks.
        accumulate: minibatches of the loader in a step.
        timeout_s: of the run.
        paused: ranks that cannot say whether a process has gone, as on a host that is busy for a second.
    """

    rule: str = "asgd"
    workers: int = 4
    rows: int = 2
    samples: int = 240
    batch: int = 4
    epochs: int = 2
    deaths: list[Death] = field(default_factory=list)
    pauses: list[float] = field(default_factory=lambda: [0.002])
    accumulate: int = 1
    timeout_s: float = 40.0
    paused: list[int] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Elements of a shard: a whole multiple of what shards are cut at."""
        return -(-self.samples * self.epochs // UNIT) * UNIT


@dataclass
class Verdict:
    """What the weights say, and how workers ended.

    Attributes:
        lost: (sample, epoch, shard) triples that are not in the model.
        repeated: how often such are in it beyond the first.
        agree: whether all who ended have the same model.
        codes: of the workers.
        killed: those whose death happened.
        said: warnings that samples may not be in it exactly once.
        errors: output of those who failed.
    """

    lost: int = 0
    repeated: int = 0
    agree: bool = True
    codes: list[int] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Deaths(KillPoints):
    """The deaths of one worker."""

    def __init__(self, rank: int, deaths: list[Death]) -> None:
        self._left = {one.point: one.nth for one in deaths if one.rank == rank}

    def at(self, point: str) -> None:
        """This worker is at a place; it may be its last."""
        if point in self._left:
            self._left[point] -= 1
            if self._left[point] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def place(self) -> None:
        """The places of the service."""
        self.around(SocketService, "push", after="applied")
        self.around(PeerServer, "_answer", after="answered")
        self.around(Durability, "_send_replica", before="sends")
        self.around(Replicas, "kept", before="kept", after="told")
        self.around(SocketService, "_take_over", before="heir", after="takeover")
        self.around(SocketLedgerClient, "secure", before="dry")
        self.around(SocketService, "finish", before="finish")
        self.around(SocketService, "confirm_final_model", before="part")
        whole = SocketLedgerClient.handle

        def handle(ledger_client: SocketLedgerClient, rank: int, channel: Any, frame: Any) -> None:
            if frame.kind == FrameKind.DONE:
                self.at("done")
            whole(ledger_client, rank, channel, frame)

        SocketLedgerClient.handle = handle  # type: ignore[method-assign, assignment]
        send = peer.Peer._send

        def torn(line: Any, pending: Any, request: Any) -> None:
            if request.values is not None:
                line._send_batch()  # what comes before it has left
                self.at("torn")
            send(line, pending, request)

        peer.Peer._send = torn  # type: ignore[method-assign, assignment]


class Counts(nn.Module):
    """Rows of counts."""

    def __init__(self, shards: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shards, width, dtype=torch.float64))

    def count(self, ids: Tensor, epoch: int, samples: int) -> None:
        """Add a minibatch to the gradients."""
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        self.weight.grad[:, ids + epoch * samples] -= 1


def rule_of(job: Pushes) -> paceline.Rule:
    """The rule, with shards of the size of a row."""
    rule = paceline.rule_from_text(job.rule)
    return replace(rule, topology=Sharded(piece=job.width))


def work(rank: int, job: Pushes, port: int, directory: Path) -> None:
    """One worker."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.workers), LOCAL_WORLD_SIZE=str(job.workers),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    deaths = Deaths(rank, job.deaths)
    deaths.place()
    if rank in job.paused:
        StallDetector.paused = lambda *_: True  # type: ignore[method-assign]
    torch.set_num_threads(1)
    model = Counts(job.workers * job.rows, job.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = paceline.attach(model, optimizer, rule_of(job), timeout_s=job.timeout_s)
    loader = DataLoader(TensorDataset(torch.arange(job.samples)), job.batch, shuffle=True)
    share, pause = run.share(loader), job.pauses[min(rank, len(job.pauses) - 1)]
    for epoch in range(job.epochs):
        optimizer.zero_grad()
        for number, (ids,) in enumerate(share, 1):
            time.sleep(pause)
            model.count(ids, epoch, job.samples)
            if number % job.accumulate:
                continue
            deaths.at("step")
            optimizer.step()
            deaths.at("stepped")
            optimizer.zero_grad()
    run.close()
    torch.save(model.weight.detach(), directory / f"final.{rank}.pt")


def _fork(rank: int, job: Pushes, port: int, directory: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        out = os.open(directory / f"said.{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        warnings.simplefilter("ignore")
        work(rank, job, port, directory)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def play(job: Pushes, directory: Path, deadline_s: float = 120.0) -> Verdict:
    """Carry out a run, and read its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    (directory / "job.json").write_text(json.dumps(asdict(job)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    pids = {_fork(rank, job, port, directory): rank for rank in range(job.workers)}
    codes: dict[int, int] = {}
    end = time.monotonic() + deadline_s
    while len(codes) < job.workers:
        for pid, rank in pids.items():
            if rank not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > end:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGABRT)
        time.sleep(0.005)
    return _judge(job, directory, [codes[rank] for rank in range(job.workers)])


def _judge(job: Pushes, directory: Path, codes: list[int]) -> Verdict:
    verdict = Verdict(codes=codes, killed=[rank for rank, code in enumerate(codes) if code == -signal.SIGKILL])
    models = [torch.load(path) for path in sorted(directory.glob("final.*.pt"))]
    for rank, code in enumerate(codes):
        said = (directory / f"said.{rank}").read_text()
        verdict.said += [line for line in said.splitlines() if "not exactly once" in line]
        if code not in (0, -signal.SIGKILL):
            verdict.errors.append(f"rank {rank}, code {code}: {said[-1500:]}")
    if models:
        verdict.agree = all(bool((one == models[0]).all()) for one in models)
        times = models[0][:, : job.samples * job.epochs].round()
        verdict.lost = int((1 - times).clamp(min=0).sum())
        verdict.repeated = int((times - 1).clamp(min=0).sum())
    return verdict


def main() -> None:
    """Play the job that stands in a file, in a directory."""
    said = json.loads(Path(sys.argv[1]).read_text())
    job = Pushes(**{**said, "deaths": [Death(**one) for one in said["deaths"]]})
    print(json.dumps(asdict(play(job, Path(sys.argv[2])))))


if __name__ == "__main__":
    main()
