# SPDX-License-Identifier: Apache-2.0
"""torchft's DiLoCo in the same storm, of SIGKILL and SIGSTOP only: what it loses, and what it makes of the time."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from _network import EmulatedNetwork

from _faults import judge
from _faults.cluster import POLL_S, Cluster
from _faults.job import Job
from _faults.storm import Storm

PROGRAM = Path(__file__).with_name("torchft_program.py")
LIGHTHOUSE_PORT = 29510
HEARTBEAT_MS = 2000  # as ours: a tenth of the timeout
JOIN_MS = 10_000
RATE_MBIT, DELAY_MS = 200.0, 1.0


class Groups(Cluster):
    """A lighthouse on host 0, and on every host a worker that is started again when it dies."""

    def __init__(self, directory: Path, job: Job, network: EmulatedNetwork, python: str, groups: int) -> None:
        super().__init__(directory, job, network)
        self.python, self.groups = python, groups
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self._number, self._stop = 0, threading.Event()
        lighthouse = str(Path(python).with_name("torchft_lighthouse"))
        times = ["--heartbeat_timeout_ms", str(HEARTBEAT_MS), "--join_timeout_ms", str(JOIN_MS)]
        self._lighthouse = self._run(0, [lighthouse, "--min_replicas", "2", *times], {}, "lighthouse")
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()

    def _run(self, host: int, command: list[str], added: dict[str, str], name: str) -> subprocess.Popen[bytes]:
        assert self.network is not None
        where = {"ADDRESS": self.network.address(host), "OMP_NUM_THREADS": "1", **self.network.environment(host)}
        with (self.directory / f"launcher-{name}.txt").open("ab") as out:
            return subprocess.Popen(
                [*self.network.prefix(host), *command],
                env={**os.environ, **where, **added},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _keep(self) -> None:
        """Start who is not there, in this thread, until the end."""
        assert self.network is not None
        found = {"TORCHFT_LIGHTHOUSE": f"http://{self.network.address(0)}:{LIGHTHOUSE_PORT}"}
        while not self._stop.wait(POLL_S):
            for group in range(self.groups):
                one = self.workers.get(group)
                if one is not None and one.poll() in (None, 0):
                    continue
                command = [self.python, "-u", str(PROGRAM), str(self.job_file), str(group), str(self.groups)]
                added = {**found, "WORKER": str(self._number)}
                self.workers[group] = self._run(group, command, added, str(group))
                self._number += 1

    def close(self) -> None:
        """End all."""
        self._stop.set()
        self._keeper.join()
        for one in [*self.workers.values(), self._lighthouse]:
            one.send_signal(signal.SIGKILL)
            one.wait()


def peers(directory: Path, python: str, minutes: float, groups: int, seed: int) -> dict[str, Any]:
    """The storm for so many minutes."""
    job = Job(
        books=str(directory / "books"),
        corpus=str(directory / "corpus.safetensors"),
        minibatches=int(2 * 60 * minutes / 0.15) * groups,  # more than are made
        seed=seed,
    )
    with EmulatedNetwork(groups, RATE_MBIT, DELAY_MS) as network:
        cluster = Groups(directory, job, network, python, groups)
        harm = Storm(cluster, seed, groups, ("kill", "stop"))
        begun = time.monotonic()
        try:
            harm.blow(lambda: time.monotonic() - begun > 60 * minutes)
            harm.alive = {worker.number for worker in cluster.training()}
        finally:
            harm.write(directory / "faults.jsonl")
            cluster.close()
    return {"torchft": _figures(cluster, harm)}


def _figures(cluster: Groups, harm: Storm) -> dict[str, Any]:
    """By the workers' own books; a block is in the model where its sync was committed and the worker took part."""
    books = cluster.books()
    merged: Counter[int] = Counter()
    over: dict[int, dict[int, float]] = {}  # committed step -> worker -> when it went on
    came: dict[int, dict[int, float]] = {}
    digests: dict[int, set[str]] = {}
    computed, failed = 0, 0
    for worker, lines in books.items():
        ids = {line["step"]: line["ids"] for line in lines if line["event"] == "step"}
        computed += len(ids)
        last = 0.0
        for line in lines:
            if line["event"] == "step":
                last = line["at"]
            elif line["event"] == "synced":
                if line["after"] <= line["before"]:
                    failed += 1
                    continue
                digests.setdefault(line["after"], set()).add(line["digest"])
                over.setdefault(line["after"], {})[worker] = line["at"]
                came.setdefault(line["after"], {})[worker] = last
                if line["in_it"]:
                    for step in range(line["step"] - line["made"] + 1, line["step"] + 1):
                        merged.update(ids[step])
    seen = [k for worker, lines in books.items() for k in _seen(lines, cut_off=worker in harm.alive)]
    spans = judge.lives(books, _losses(harm), harm.faults)
    useful, lived_s = judge.used_time(sum(merged.values()) // cluster.job.batch, cluster.job.minibatch_s, spans)
    rows = _recoveries(harm, came, over)
    calm = [max(over[k].values()) - max(came[k].values()) for k in over if len(over[k]) == cluster.groups]
    return {
        "computed_minibatches": computed,
        "merged_minibatches": sum(merged.values()) // cluster.job.batch,
        "seen_but_lost": len(set(seen) - set(merged)),
        "repeated": sum(n - 1 for n in merged.values() if n > 1),
        "failed_syncs": failed,
        "committed_syncs": len(over),
        "steps_whose_copies_differ": sorted(step for step, found in digests.items() if len(found) > 1),
        "used_time": round(useful, 4),
        "lived_s": round(lived_s, 1),
        "recovery_s": judge.spread(rows),
        "exchange_s": {"median": round(statistics.median(calm), 3)} if calm else {},
        "faults": dict(Counter(fault.kind for fault in harm.faults)),
    }


def _seen(lines: list[judge.Event], cut_off: bool) -> list[int]:
    """Samples that a worker trained on; of one that the end of the measurement cut off, to its last sync."""
    last = max((n for n, line in enumerate(lines) if line["event"] == "synced"), default=-1) if cut_off else len(lines)
    return [k for line in lines[: last + 1] if line["event"] == "step" for k in line["ids"]]


def _losses(harm: Storm) -> list[judge.Event]:
    """Who is killed is lost at once; a stop counts as survived, because only its own log tells."""
    return [{"kind": "lost", "worker": fault.worker, "at": fault.at} for fault in harm.faults if fault.kind == "kill"]


def _recoveries(harm: Storm, came: dict[int, dict[int, float]], over: dict[int, dict[int, float]]) -> list[float]:
    """After every kill: from it, or from when the last survivor came, until all had made the next committed sync."""
    rows = []
    for fault in harm.faults:
        if fault.kind != "kill":
            continue
        later = [step for step in over if max(over[step].values()) > fault.at]
        if later:
            step = min(later)
            rows.append(round(max(over[step].values()) - max(fault.at, *came[step].values()), 3))
    return rows
