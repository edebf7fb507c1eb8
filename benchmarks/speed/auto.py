# SPDX-License-Identifier: Apache-2.0
"""Does `auto` choose well? Its speed over that of the best rule chosen by hand, on links of several speeds.

Each worker has a host of its own (a network namespace with a shaped cable to a switch; "loopback" is one host without
any), and an emulated accelerator, whose computing is a timed wait: two cores could not compute for all workers, and a
real model's computing would be slowed down by what is measured. Parameters, gradients and exchanges are real.

On each link the same processes train under every rule in turn, round after round. A rule is attached anew, makes a
block (`auto` its probe and its first blocks: `--settle` steps), and then whole blocks are timed, all workers together.
A rule's figure is the median of the rounds; ratios are of figures from the same rounds. What `auto` takes to begin, in
seconds beyond its later pace, is told apart, and as part of `--minibatches` of each worker.

A rule is comparable with `auto` if it exchanges at least as often as `auto` does in the end: longer blocks are faster
and lose quality. Of comparable rules `auto` may be slower than the fastest by the time that exchanges take of it.

    python benchmarks/speed/auto.py [--links 100,1000,10000,loopback] [--workers 2] [--rounds 3]

The last line is a JSON object: `auto_over_best.LINK` (time over that of the fastest comparable rule), `auto_whole.LINK`
(the same with what it takes to begin), `auto_over_all.LINK` (over the fastest of all), `chose.LINK`, `worst`,
`step_ms.LINK.RULE` and `start_s.LINK`.

Without root for network namespaces it has only the key "skipped", with the reason.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from _emulate import emulated_model
from _workers import Copy, is_quick
from network import Meeting, _wait, plain_step, sgd, variables

RULES = (
    "sync",
    "bmuf(period=4)",
    "bmuf(period=16)",
    "bmuf(period=64)",
    "bmuf(period=4, overlap=4)",
    "bmuf(period=16, overlap=16)",
    "bmuf(period=64, overlap=64)",
    "bmuf(period=4, overlap=4, codec='bf16')",
    "bmuf(period=4, overlap=4, codec='int8')",
    "bmuf(period=8, overlap=8, codec='int8')",
    "bmuf(period=16, overlap=16, codec='int8')",
    "diloco(period=16)",
)
AUTO = "auto"
LOOPBACK = "loopback"


# -- a worker ---------------------------------------------------------------------------------------------------------


def measured(options: argparse.Namespace, meeting: Meeting, rule: str) -> dict[str, Any]:
    """One training: seconds of a step after the start, of the start, and what `auto` chose."""
    import paceline

    compute_s = options.compute_ms / 1e3
    torch.manual_seed(0)
    model = emulated_model(options.parameters, 16, compute_s / 3, 2 * compute_s / 3)
    optimizer = sgd(model)
    run = paceline.attach(model, optimizer, rule, timeout_s=options.timeout)
    step, first = plain_step(model, optimizer), options.settle if rule == AUTO else max(4, run.rule.schedule.period)
    meeting.together()
    began = perf_counter()
    for _ in range(first):
        step()
    settled = perf_counter()
    period = run.rule.schedule.period
    steps = -(-options.steps // period) * period
    meeting.together()
    timed = perf_counter()
    for _ in range(steps):
        step()
    step_s = meeting.longest((perf_counter() - timed) / steps)
    meeting.together()
    start_s = meeting.longest(settled - began) - first * step_s
    meeting.together()
    chose = f"{run.rule.text()}, period {run.rule.schedule.period}"
    run.close()
    return {"step_s": step_s, "start_s": start_s, "period": period, "chose": chose}


def worker(options: argparse.Namespace) -> None:
    """One rank on one link."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    if options.show:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = Meeting(rank, size, os.environ["MASTER_ADDR"], options.timeout)
    dist.init_process_group("gloo")
    rows: dict[str, list[Any]] = {}
    for number in range(options.rounds):
        rules = [AUTO, *options.rules] if number % 2 == 0 else [*options.rules, AUTO]  # neither is always first
        for rule in rules:
            rows.setdefault(rule, []).append(measured(options, meeting, rule))
            if rank == 0:
                found = rows[rule][-1]
                print(f"{rule:42} {1e3 * found['step_s']:8.2f} ms  {found['chose']}", file=sys.stderr, flush=True)
    if rank == 0:
        Path(options.answer).write_text(json.dumps(rows))
    meeting.leave()
    os._exit(0)


# -- the links --------------------------------------------------------------------------------------------------------


class Loopback:
    """All workers on this host, without any emulation."""

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *error: object) -> None: ...

    def prefix(self, host: int) -> list[str]:
        return []

    def environment(self, host: int) -> dict[str, str]:
        return {}

    def address(self, host: int) -> str:
        return "127.0.0.1"


def on_link(link: str, options: argparse.Namespace) -> dict[str, list[Any]]:
    """All rules on one link: rule -> what each round found."""
    from devtools.emulation import EmulatedNetwork

    network = Loopback() if link == LOOPBACK else EmulatedNetwork(options.workers, float(link), options.delay)
    with network, tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        errors = [Path(folder) / f"err.{k}" for k in range(options.workers)]
        processes = [_started(network, k, options, answer, errors[k]) for k in range(options.workers)]
        try:
            _wait(processes, errors, 60 * options.timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found: dict[str, list[Any]] = json.loads(answer.read_text())
        return found


def _started(network: Any, host: int, options: argparse.Namespace, answer: Path, errors: Path) -> Any:
    import subprocess

    names = ("parameters", "compute_ms", "steps", "settle", "rounds", "timeout")
    shown = ["--show"] if options.show and host == 0 else []
    arguments = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    command = [*network.prefix(host), sys.executable, str(Path(__file__).resolve()), "--worker", *arguments]
    command += [*shown, "--answer", str(answer), *(word for rule in options.rules for word in ("--rule", rule))]
    with errors.open("wb") as sink:
        out = None if options.show and host == 0 else sink
        environment = variables(network, host, options.workers)
        start = Copy if is_quick() else subprocess.Popen
        return start(command, env=environment, stdout=subprocess.DEVNULL, stderr=out)


# -- what it says -----------------------------------------------------------------------------------------------------


def judged(rows: dict[str, list[Any]], minibatches: int) -> dict[str, Any]:
    """The figures of one link."""
    step_s = {rule: statistics.median(one["step_s"] for one in found) for rule, found in rows.items()}
    auto, period = step_s.pop(AUTO), max(one["period"] for one in rows[AUTO])
    start_s = statistics.median(one["start_s"] for one in rows[AUTO])
    comparable = {rule: seconds for rule, seconds in step_s.items() if rows[rule][0]["period"] <= period}
    comparable = comparable or step_s  # of those that were given
    best = min(comparable, key=lambda rule: comparable[rule])
    whole_s = start_s + minibatches * auto
    return {
        "auto_over_best": round(auto / comparable[best], 4),
        "auto_whole": round(whole_s / (minibatches * comparable[best]), 4),
        "auto_over_all": round(auto / min(step_s.values()), 4),
        "chose": [one["chose"] for one in rows[AUTO]],
        "best": best,
        "start_s": round(start_s, 2),
        "step_ms": {rule: round(1e3 * seconds, 2) for rule, seconds in {AUTO: auto, **step_s}.items()},
    }


def show(link: str, found: dict[str, Any]) -> None:
    """A table of one link."""
    print(f"\n{link if link == LOOPBACK else f'{link} Mbit/s'}: auto chose {' / '.join(found['chose'])}")
    for rule, step_ms in sorted(found["step_ms"].items(), key=lambda row: row[1]):
        print(f"  {rule:42} {step_ms:8.2f} ms{'   best of those comparable' if rule == found['best'] else ''}")
    print(
        f"  auto over the best comparable: {found['auto_over_best']:.3f}, with {found['start_s']:g} s to begin "
        f"{found['auto_whole']:.3f}; over the best of all: {found['auto_over_all']:.3f}",
        flush=True,
    )


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The command line, or what is given in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--links", default=f"100,1000,10000,{LOOPBACK}", help="Mbit/s of each direction, comma between")
    add("--workers", type=int, default=2)
    add("--delay", type=float, default=0.1, help="from host to host, one way, ms")
    add("--parameters", type=int, default=2_500_000)
    add("--compute-ms", type=float, default=50.0, help="of the emulated accelerator, a step")
    add("--steps", type=int, default=48, help="timed, at least")
    add("--settle", type=int, default=96, help="steps before auto is timed")
    add("--rounds", type=int, default=3)
    add("--minibatches", type=int, default=20_000, help="of each worker, for auto_whole")
    add("--timeout", type=float, default=60.0, help="seconds of a wait")
    add("--rule", dest="rules", action="append", help="in place of the rules that are tried")
    add("--show", action="store_true", help="each figure when it is measured")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--answer", default="", help=argparse.SUPPRESS)
    options = _quick.parse(
        parser,
        given,
        links="1000",
        rules=["sync", "bmuf(period=4)"],
        parameters=200_000,
        compute_ms=4.0,
        steps=8,
        settle=48,
        rounds=1,
    )
    options.rules = options.rules or list(RULES)
    return options


def main() -> None:
    """All links."""
    options = parse()
    if options.worker:
        worker(options)
        return
    from devtools.emulation import EmulatedNetwork

    reason = EmulatedNetwork.possible()
    if reason and options.links != LOOPBACK:
        print(json.dumps({"skipped": reason}))
        return
    found: dict[str, Any] = {}
    for link in options.links.split(","):
        found[link] = judged(on_link(link, options), options.minibatches)
        show(link, found[link])
    keys = dict.fromkeys(key for row in found.values() for key in row)
    result: dict[str, Any] = {key: {link: row[key] for link, row in found.items() if key in row} for key in keys}
    result["worst"] = max(result["auto_over_best"].values())
    names = ("workers", "delay", "parameters", "compute_ms", "rounds", "minibatches")
    print(json.dumps(result | {name: getattr(options, name) for name in names}))


if __name__ == "__main__":
    main()
