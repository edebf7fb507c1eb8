# SPDX-License-Identifier: Apache-2.0
"""Places of the program at which a process is killed with SIGKILL: never at a time, always at a place.

The kills of a run are in an order, and only the first that has not happened is armed, in all processes of the run at
once; who comes to its place first is the one. A worker's places are

    attach  holds  take  give  resume  loaded  resumed      as it comes in: from a checkpoint, or from a living worker
    step  stepped                                           round the optimizer's step
    exchange  summed  commit  verdict  applied              before the exchange; has the sums; has said so; knows that
                                                            it counts; has applied it
    written  finish  finished  tidy                         a step of the checkpoint: the files; before and after the
                                                            directory gets its name; before old ones are removed
    leave                                                   at the end of the data

and those of the control plane `record`, `recorded` and `said`: before and behind its record of a commit, and when the
first verdict of it was sent.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from devtools.counting.job import Job, Kill
from devtools.counting.kill_points import KillPoints


class Points(KillPoints):
    """The kills of a run, as one of its processes sees them.

    Args:
        job: of the run.

    Attributes:
        exchange: how many this process knows of.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.exchange = job, 0

    @property
    def armed(self) -> tuple[int, Kill] | None:
        """The next kill and its number."""
        for number, kill in enumerate(self.job.kills):
            if not (self.job.marks / str(number)).exists():
                return number, kill
        return None

    def at(self, point: str) -> None:
        """This process is at a place; it may be its last."""
        found = self.armed
        if found is None or found[1].point != point or self.exchange < found[1].exchange:
            return
        number, kill = found
        try:
            mark = os.open(self.job.marks / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return  # another one was first
        os.write(mark, f"{point} exchange {self.exchange} pid {os.getpid()} {kill.whom}\n".encode())
        if kill.whom != "self":
            for pid in [*living(self.job)] if kill.whom == "all" else [int(self._control.read_text())]:
                if pid != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        if kill.whom != "control" or int(self._control.read_text()) == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def _control(self) -> Path:
        return Path(self.job.directory) / "control.pid"


def living(job: Job) -> list[int]:
    """Processes of workers that have come as far as to say so, and live."""
    return [int(path.name) for path in job.pids.iterdir() if lives(int(path.name))]


def lives(pid: int) -> bool:
    """Whether a process does."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def in_worker(points: Points) -> None:
    """The places of a worker, but for those that its program has itself."""
    from paceline.checkpoint import loading, saving, store
    from paceline.flow import joining, membership
    from paceline.flow.control import client
    from paceline.run import assembly
    from paceline.update.exchange.exchanger import Exchanger

    points.around(Exchanger, "open", before="exchange")
    points.around(client.ControlClient, "holds_state", after="holds")
    points.around(joining, "receive_state", before="take")
    points.around(joining, "pack_state", after="give")
    points.around(loading.CheckpointFinder, "found", after="resume")
    points.around(assembly, "_load", after="loaded")
    points.around(membership.ElasticMembership, "commit", before="summed", after="verdict")
    points.around(membership.ElasticMembership, "take_over", before="applied")
    points.around(saving, "write_rank", after="written")
    points.around(saving, "_seal", before="finish")
    points.around(saving, "_replace", after="finished")
    points.around(store.DirectoryStore, "tidy", before="tidy")
    _commits(points)


def _commits(points: Points) -> None:
    from paceline.flow.control import client, wire

    whole = client.ClientConnection.request

    def request(self: Any, kind: int, numbers: tuple[int, ...], note: Any = None) -> None:
        whole(self, kind, numbers, note)
        if kind == wire.COMMIT:
            points.at("commit")

    client.ClientConnection.request = request  # type: ignore[method-assign]


def in_launcher(points: Points) -> None:
    """The places of the control plane."""
    from paceline.communication.sockets import channel
    from paceline.flow.control import server, state_machine, wire

    done = state_machine.StateMachine._committed

    def committed(self: Any, *args: Any) -> None:
        done(self, *args)
        points.exchange, self.just_committed = self.exchange, True

    write = server.ControlServer._write

    def written(self: Any, state: bytes) -> None:
        commit, self._machine.just_committed = getattr(self._machine, "just_committed", False), False
        if commit:
            points.at("record")
        write(self, state)
        if commit:
            points.at("recorded")

    send = channel.Channel.send

    def sent(self: Any, kind: int, numbers: Any = (), *args: Any, **kwargs: Any) -> None:
        send(self, kind, numbers, *args, **kwargs)
        if kind == wire.MESSAGE_KINDS["verdict"] and numbers[1]:
            points.at("said")

    state_machine.StateMachine._committed = committed  # type: ignore[method-assign, assignment]
    server.ControlServer._write = written  # type: ignore[method-assign]
    channel.Channel.send = sent  # type: ignore[method-assign]
