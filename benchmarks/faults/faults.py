# SPDX-License-Identifier: Apache-2.0
"""A storm over an elastic run: six hosts, and at random every 10 to 20 s something breaks.

    python benchmarks/faults/faults.py [--minutes 10] [--workers 6] [--seed 0] [--launcher]  the storm; as root
    python benchmarks/faults/faults.py --slow              links of 10 Mbit/s, and no faults
    python benchmarks/faults/faults.py --kill              recovery from SIGKILL, on loopback

Each host is a network namespace with a link of 200 Mbit/s and 1 ms, a launcher and a worker; two more hosts come and
go. A character model of 325,000 parameters learns Python's standard library under `bmuf(period=16)`; a minibatch
takes 0.15 s, of which all but a few milliseconds are a sleep that stands for a device, so that two cores can carry
eight workers. The run has a fixed number of samples, each to be used once, and ends by itself. The faults, in turns
of random order: SIGKILL of a worker, SIGSTOP or a cut link (half of them for 0.5 to 1.7 s, half for 2.5 to 8 s;
who is silent for a tenth of the timeout of 20 s is lost), 10 % packet loss for 5 to 10 s, a NaN in one worker's model,
a flipped bit in the newest checkpoint (a program that resumes at once has to take the one before), a host that joins
(or, when both are there, one that is ended by SIGTERM, or SIGKILLed with its worker). Links of host 0, which has the
control plane, are not cut; `--launcher` kills its launcher once, and starts another with `--again`. Then the same
samples are trained by six workers undisturbed.

The last line is a JSON object:

    lost, repeated    samples that are in the global model less or more often than once. A buffer of the model says
                      which worker's minibatches each exchange has taken in, and each worker wrote down which samples
                      these were before it trained on them (_faults/program.py).
    agree             whether all who came to the end have the same bits, which the run itself checks at each exchange
                      too
    loss_ratio        validation loss of the global model, after the storm over undisturbed
    used_time         minibatches that are in the global model, times the 0.15 s of one, over the time of all workers
                      in which they could work: from when they hold the model (not: process start, import of torch,
                      waiting to be taken in) to their death, the beginning of the fault by which they were lost, or
                      the end of the data; stops and cuts that are survived are left out. So what counts against it is
                      all waiting for others, exchanges themselves, work that was lost, and slowed processors
    useful_work       used_time over that of the undisturbed run: what living workers did of what they could have done
    recovery_s        from the control plane's word that a worker is lost, or from when the last survivor came to the
                      next exchange if that was later, until all survivors have made it: median, worst; `waiting` of
                      them had all survivors waiting when the word came
    exchange_s        the same of exchanges that nothing happened to; `recovery_ratio` is the ratio of the medians
    faults, unnamed   how many of each kind, and those that no log has a line for
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "char_lm"))

import torch
from _faults import count, judge
from _faults.cluster import Cluster
from _faults.job import Job
from _faults.storm import GUESTS, KINDS, Storm
from devtools.emulation import EmulatedNetwork
from model import CharLM, validation_loss
from safetensors.torch import load_file, save_file

from data import load_corpus

RATE_MBIT, DELAY_MS = 200.0, 1.0
EXPECTED = 0.88  # part of the workers' time that becomes useful work, to choose the number of samples
START_S = 20.0
JUDGED = 200_000  # characters of the held-out text


def main() -> None:
    """Do what was asked; JSON on the last line."""
    options = parse()
    directory = options.out or Path(tempfile.mkdtemp(prefix="faults-"))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    text, judged = load_corpus(), 2_000 if options.quick else JUDGED
    save_file({"train": text.train, "validation": text.validation[:judged]}, directory / "corpus.safetensors")
    if options.slow:
        from _faults.slow import slow

        found = slow(directory, options.minutes, options.seed)
    elif options.kill:
        from _faults.kill import kill

        found = kill(directory, options.kill, options.seed, 3 if options.quick else 4, options.hidden)
    else:
        found = storm(directory, options)
    print(f"all of it: {directory}")
    print(json.dumps(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A storm over an elastic run.")
    parser.add_argument("--minutes", type=float, default=10.0, help="about how long the storm takes")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minibatch-s", type=float, default=0.15)
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults")
    parser.add_argument("--launcher", action="store_true", help="kill host 0's launcher once")
    parser.add_argument("--no-calm", action="store_true", help="leave out the undisturbed run")
    parser.add_argument("--out", type=Path, help="directory for what the runs leave; it is emptied first")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--kill", type=int, nargs="?", const=20, default=0, metavar="TIMES")
    parser.add_argument("--hidden", type=int, default=256, help="of the model")
    options = _quick.parse(parser, minutes=0.4, workers=2, kinds="kill", no_calm=False, hidden=32)
    if options.quick and options.kill:
        options.kill = 1
    return options


def storm(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The storm, and then the same samples undisturbed."""
    minibatches = int((60 * options.minutes - START_S) * options.workers * EXPECTED / options.minibatch_s)
    kinds = tuple(options.kinds.split(","))
    job = Job(
        books=str(directory / "storm" / "books"),
        corpus=str(directory / "corpus.safetensors"),
        minibatches=minibatches,
        minibatch_s=options.minibatch_s,
        timeout_s=options.timeout,
        seed=options.seed,
        hidden=options.hidden,
        checkpoint=str(directory / "storm" / "steps") if "checkpoint" in kinds else "",
    )
    found = _disturbed(directory / "storm", job, options, kinds)
    if not options.no_calm:
        calm = Job(**{**vars(job), "books": str(directory / "calm" / "books"), "checkpoint": ""})
        undisturbed = found if options.quick else _undisturbed(directory / "calm", calm, options)  # no fault
        found["loss_ratio"] = round(found["loss"] / undisturbed["loss"], 5)
        found["useful_work"] = round(found["used_time"] / undisturbed["used_time"], 4)
        found |= {f"{key}_calm": undisturbed[key] for key in ("loss", "used_time", "lost", "repeated", "seconds")}
        found["exchange_s_calm"] = undisturbed["exchange_s"]
        found["recovery_ratio"] = None
        if found["recovery_s"] and undisturbed["exchange_s"]:
            found["recovery_ratio"] = round(found["recovery_s"]["median"] / undisturbed["exchange_s"]["median"], 2)
    return found


def _disturbed(directory: Path, job: Job, options: argparse.Namespace, kinds: tuple[str, ...]) -> dict[str, Any]:
    launcher_s = 0.5 * 60 * options.minutes if options.launcher else None
    with EmulatedNetwork(options.workers + GUESTS, RATE_MBIT, DELAY_MS) as network:
        cluster = Cluster(directory, job, network)
        harm = Storm(cluster, options.seed, options.workers, kinds, launcher_s)
        begun = time.monotonic()
        try:
            for host in range(options.workers):
                cluster.start(host)
            harm.blow(lambda: _over(cluster, begun + 120 * options.minutes))
            codes = cluster.wait(60 + 3 * job.timeout_s)
        finally:
            seconds = time.monotonic() - begun
            harm.write(directory / "faults.jsonl")
            cluster.close()
    found = figures(cluster, harm, seconds)
    (directory / "faults.jsonl").unlink()
    harm.write(directory / "faults.jsonl")  # now each with the line that names it
    return {**found, "exit_codes": codes, "seed": options.seed, "workers": options.workers}


def _undisturbed(directory: Path, job: Job, options: argparse.Namespace) -> dict[str, Any]:
    with EmulatedNetwork(options.workers, RATE_MBIT, DELAY_MS) as network:
        cluster = Cluster(directory, job, network)
        begun = time.monotonic()
        try:
            for host in range(options.workers):
                cluster.start(host)
            cluster.wait(120 * options.minutes)
        finally:
            cluster.close()
    return figures(cluster, None, time.monotonic() - begun)


def _over(cluster: Cluster, deadline: float) -> bool:
    """Whether somebody has come to the end of the data, or host 0's launcher has ended by itself."""
    if time.monotonic() > deadline:
        raise SystemExit(f"the run does not end; {cluster.tail()}")
    through = any(line["event"] == "through" for lines in cluster.books().values() for line in lines)
    return through or cluster.launchers[0].poll() is not None


def figures(cluster: Cluster, harm: Storm | None, seconds: float) -> dict[str, Any]:
    """What the books and logs of a run say."""
    job, books, events = cluster.job, cluster.books(), cluster.events()
    faults = harm.faults if harm else []
    seen = count.exchanges(books)
    spans = judge.lives(books, events, faults)
    merged = count.samples(books, seen, job.samples)
    useful, lived_s = judge.used_time(merged["merged"], job.minibatch_s, spans)
    recovered = judge.recoveries(seen, events)
    calm = judge.calm_exchanges(seen, events, faults)
    digests = count.digests(books)
    judge.naming(faults, events, judge.journals(sorted(cluster.directory.glob("host-*"))))
    found: dict[str, Any] = {
        **merged,
        "samples": job.samples,
        "agree": len(set(digests.values())) == 1,
        "ended": len(digests),
        "loss": loss(cluster),
        "used_time": round(useful, 4),
        "lived_s": round(lived_s, 1),
        "seconds": round(seconds, 1),
        "came": len(spans),
        "recovery_s": judge.spread([row["seconds"] for row in recovered]),
        "recovery_waiting_s": judge.spread([row["seconds"] for row in recovered if row["waiting"]]),
        "exchange_s": judge.spread(calm),
    }
    (cluster.directory / "recoveries.json").write_text(json.dumps(recovered, indent=1))
    hosts = {worker.number: worker.host for worker in cluster.begun()}
    line = judge.timeline(spans, hosts, seen, faults)
    (cluster.directory / "timeline.json").write_text(json.dumps(line))
    if harm:
        kinds = sorted({fault.kind for fault in faults})
        found["faults"] = {kind: sum(fault.kind == kind for fault in faults) for kind in kinds}
        found["unnamed"] = [
            f"{f.kind} of worker {f.worker} on host {f.host} for {f.about.get('for_s', 0)} s"
            for f in faults
            if not f.about["line"]
        ]
        checks = [fault for fault in faults if fault.kind == "checkpoint"]
        found["resumed_right"] = f"{sum(bool(f.about.get('right')) for f in checks)} of {len(checks)}"
    return found


def loss(cluster: Cluster) -> float:
    """Validation loss of the global model, in nats per character."""
    final = sorted(Path(cluster.job.books).glob("final-*.safetensors"))
    if not final:
        raise SystemExit(f"nobody came to the end; {cluster.tail()}")
    model = CharLM(cluster.job.hidden)
    state = {name.removeprefix("net."): x for name, x in load_file(final[0]).items() if name.startswith("net.")}
    model.load_state_dict(state)
    torch.set_num_threads(2)
    return round(validation_loss(model, load_file(cluster.job.corpus)["validation"]), 5)


if __name__ == "__main__":
    main()
