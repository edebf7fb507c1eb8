# SPDX-License-Identifier: Apache-2.0
"""What do receipts cost (`attach(receipts=..)`), and what does it cost to check them?

Two processes over gloo train the same multilayer perceptron twice at a time, with and without receipts, in rounds of
`--steps` minibatches (at least one exchange), one after the other; a round with receipts ends when its last line is
written. A worker hashes what it brings to an exchange and what it holds afterwards: three numbers a parameter with
`bmuf` (parameter, anchor, momentum), one with `sync`. So the cost is that of a multiple of the parameters in each
exchange, beside the minibatches between two exchanges.

Then one bit of one parameter of one worker flips before a minibatch, all drawn at random, in runs of four virtual
workers. The receipts are compared with those of an honest run, as `paceline verify --block` does.

    python benchmarks/speed/receipts.py [--width 512] [--batch 128] [--rounds 7] [--steps 32] [--merges 500]
        [--flips 32] [--rules RULE ..] [--quick]

The last line is a JSON object: `parameters`, `ratio`, by rule: the median over rounds of the seconds with receipts over
those without, `least` and `most` of them, `processor`, by rule: the same median of processor seconds, which a busy
machine disturbs less, `per_exchange_ms`, by rule: processor milliseconds that an exchange takes longer, `hash_gb_s`,
the rate of SHA-256 on one core, `line_bytes`, by rule: what a worker writes for an exchange, `audit_ms_per_merge`, what
`paceline verify` takes for an exchange of two workers, `flips`, and of them `found`, with the right block and worker.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import _workers
import torch
from torch import nn

import paceline
from paceline_plugins.receipts.audit import audit, find
from paceline_plugins.receipts.chain import Chain
from paceline_plugins.receipts.verify_command.again import first_difference

RULES = ("sync()", "bmuf(period=4)", "bmuf(period=16)", "bmuf(period=64)")
MEDIANS = ("ratio", "least", "most", "processor")
TIMEOUT_S = 1800.0


def network(width: int) -> nn.Module:
    """Three wide layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class Training:
    """One of the two runs of a process."""

    def __init__(self, width: int, batch: int, rule: str, folder: Path | None) -> None:
        self._model = network(width)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._x, self._y = torch.randn(batch, 64), torch.randint(10, (batch,))
        self.run = paceline.attach(self._model, self._optimizer, rule, receipts=folder, data="own", timeout_s=300)

    def round(self, steps: int) -> tuple[float, float]:
        """Seconds, and processor seconds of all threads, of `steps` minibatches, until the last receipt is written."""
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self._model(self._x), self._y).backward()
            self._optimizer.step()
        receipts = next(iter(self.run._context.observers), None)
        if receipts is not None:
            receipts.flush()
        return time.perf_counter() - began, time.process_time() - worked


def work(args: argparse.Namespace) -> None:
    """One worker: rounds of each rule, the two runs in turn."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for number, rule in enumerate(args.rules):
        folder = Path(args.folder) / str(number)
        pair = [Training(args.width, args.batch, rule, place) for place in (None, folder)]
        period = int(rule.partition("period=")[2].rstrip(")") or 1)
        exchanges = max(1, args.steps // period)
        rounds: list[list[tuple[float, float]]] = [[], []]
        for turn in range(args.rounds + 1):
            order = (0, 1) if turn % 2 else (1, 0)
            spent = {which: pair[which].round(exchanges * period) for which in order}
            for which in order if turn else ():  # the first round warms up
                rounds[which].append(spent[which])
        ratios = [kept[0] / bare[0] for bare, kept in zip(*rounds, strict=True)]
        worked = [kept[1] / bare[1] for bare, kept in zip(*rounds, strict=True)]
        more = [kept[1] - bare[1] for bare, kept in zip(*rounds, strict=True)]
        found[rule] = {
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "processor": statistics.median(worked),
            "ms": 1000 * statistics.median(more) / exchanges,
        }
        for one in pair:
            one.run.close()
        lines = (folder / "rank-000.jsonl").read_text().splitlines()
        found[rule]["bytes"] = round(statistics.fmean(len(line) for line in lines[1:-1]))
    _workers.answer(found)


def hash_rate() -> float:
    """GB/s of SHA-256."""
    data = bytes(1 << 26)
    began = time.perf_counter()
    hashlib.sha256(data).digest()
    return len(data) / (time.perf_counter() - began) / 1e9


def audit_ms(merges: int) -> float:
    """Milliseconds for an exchange, of the receipts of a run of two virtual workers with shared data."""

    def train(folder: Path) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with paceline.attach(model, optimizer, "averaging(period=4)", receipts=folder) as run:
            for x in run.share(torch.randn(8 * merges, 4).split(1)):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    with tempfile.TemporaryDirectory() as place:
        paceline.simulate(lambda: train(Path(place)), 2)
        began = time.perf_counter()
        findings = audit(Path(place), find(Path(place)))
        seconds = time.perf_counter() - began
    assert not findings.problems, findings
    return 1000 * seconds / merges


BLOCKS, WORKERS = 6, 4


def flipped(folder: Path, flip: tuple[int, int, int, int] | None) -> list[Chain]:
    """The chains of a small run in which `flip` (worker, minibatch, parameter, bit) happens."""

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        rule = "bmuf(period=4, reproducible=True)"
        with paceline.attach(model, optimizer, rule, receipts=folder) as run:
            for x in run.share(torch.randn(BLOCKS * 4 * WORKERS * 2, 8).split(2)):
                if flip is not None and flip[:2] == (run.world.rank, run.minibatches):
                    flat = model[0].weight.data.view(-1).view(torch.int32)
                    flat[flip[2]] ^= -(1 << 31) if flip[3] == 31 else 1 << flip[3]
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    paceline.simulate(train, WORKERS)
    return find(folder)


def flips_found(flips: int) -> int:
    """Of so many flips, those that are found in their block with their worker."""
    draw, found = random.Random(0), 0
    with tempfile.TemporaryDirectory() as place:
        honest = flipped(Path(place) / "honest", None)
        for number in range(flips):
            flip = draw.randrange(WORKERS), draw.randrange(BLOCKS * 4), draw.randrange(128), draw.randrange(32)
            wrong = flipped(Path(place) / str(number), flip)
            assert not [one for one in wrong if one.problems], "a run with a flipped bit has whole chains"
            said = first_difference(wrong, honest, BLOCKS)
            block, worker = flip[1] // 4 + 1, flip[0]
            found += said is not None and said[0] == block and said[1].startswith(f"worker {worker} brought")
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=32, help="minibatches in a round")
    parser.add_argument("--merges", type=int, default=500, help="of the receipts that are checked")
    parser.add_argument("--flips", type=int, default=32)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = _quick.parse(parser, width=64, batch=4, rounds=2, steps=4, merges=8, flips=1, rules=list(RULES)[:2])
    if _workers.is_worker():
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        passed = [f"--{name}={getattr(args, name)}" for name in ("width", "batch", "rounds", "steps")]
        found = _workers.launch(__file__, [*passed, "--rules", *args.rules, "--folder", folder], 2, TIMEOUT_S)
    print(f"{'rule':18}" + "".join(f"{name:>11}" for name in (*MEDIANS, "ms", "bytes")))
    for rule, row in found.items():
        print(f"{rule:18}" + "".join(f"{row[name]:11.3f}" for name in (*MEDIANS, "ms", "bytes")))
    names = {rule: rule.partition("(")[0] + rule.partition("period=")[2].rstrip(")") for rule in found}
    result = {
        "parameters": sum(p.numel() for p in network(args.width).parameters()),
        **{key: {names[rule]: round(row[key], 3) for rule, row in found.items()} for key in MEDIANS},
        "per_exchange_ms": {names[rule]: round(row["ms"], 2) for rule, row in found.items()},
        "hash_gb_s": round(hash_rate(), 2),
        "line_bytes": {names[rule]: row["bytes"] for rule, row in found.items()},
        "audit_ms_per_merge": round(audit_ms(args.merges), 3),
        "flips": args.flips,
        "found": flips_found(args.flips),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
