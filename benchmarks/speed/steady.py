# SPDX-License-Identifier: Apache-2.0
"""Does `auto` stand still? The same program by `paceline run`, on an idle machine and beside a load of 4.

`--idle` and `--loaded` runs of a small program on two workers, a `--long` one beside the load, and the time of `auto`
over that of rules chosen by hand (`auto.py`) on each of `--links`. With `--add FILE` an earlier result is continued.

    python benchmarks/speed/steady.py [--idle 20] [--loaded 20] [--long 8000] [--links 1000,..] [--add FILE]

The last line is a JSON object: `same_rule_idle` and `same_rule_loaded` (the share of runs that chose the most frequent
rule), `changes_per_hour_loaded` (choices after the first), `auto_over_best` (the worst link); and of each run or link
`idle`, `loaded`, `long` and `links`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import auto

from paceline.observe.reports.read import read_run

PROGRAM = """
import itertools, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(51200, 256), torch.randint(10, (51200,)))
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 64, shuffle=True)
left = int(sys.argv[1])
while left > 0:
    for x, y in itertools.islice(loader, left):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    left -= 400
"""
"""Two workers make 400 minibatches a pass each."""


def run(minibatches: int) -> dict[str, Any]:
    """One run: the rule, how often it was chosen again, the seconds from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(PROGRAM, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "--workers",
            "2",
            "--log",
            "log",
            "train.py",
            str(minibatches),
        ]
        began = perf_counter()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        log = read_run(Path(folder) / "log")
        again = sum(1 for change in log.tuned if change.why)
        return {"rule": log.rule, "again": again, "seconds": round(perf_counter() - began, 1), "why": log.why}


def beside_load(runs: list[int], load: int) -> list[dict[str, Any]]:
    """Runs beside `load` busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        return [run(minibatches) for minibatches in runs]
    finally:
        for process in busy:
            process.kill()
            process.wait()


def same(runs: list[dict[str, Any]]) -> float:
    """The share of the most frequent rule."""
    return round(Counter(one["rule"] for one in runs).most_common(1)[0][1] / len(runs), 3) if runs else 0.0


def main() -> None:
    """All parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size, what in (
        ("idle", 20, "runs"),
        ("loaded", 20, "runs beside a load"),
        ("long", 8000, "minibatches of one"),
        ("minibatches", 40, "of each of the others"),
    ):
        parser.add_argument(f"--{name}", type=int, default=size, help=what)
    parser.add_argument("--links", default="", help="of auto.py, comma between")
    parser.add_argument("--add", default="", help="an earlier result")
    options = _quick.parse(parser, idle=1, loaded=0, long=0, minibatches=14, links=auto.LOOPBACK, add="")
    quick = ["--quick"] if options.quick else ["--rounds", "2"]
    parts: dict[str, Any] = {"idle": [], "loaded": [], "long": [], "links": {}}
    if options.add:
        parts = {name: json.loads(Path(options.add).read_text(encoding="utf-8"))[name] for name in parts}
    parts["idle"] += [run(options.minibatches) for _ in range(options.idle)]
    parts["loaded"] += beside_load([options.minibatches] * options.loaded, 4)
    parts["long"] += beside_load([options.long] if options.long else [], 4)
    for link in options.links.split(",") if options.links else ():
        parts["links"][link] = auto.judged(auto.on_link(link, auto.parse(quick)), 20_000)
    hours = sum(one["seconds"] for one in parts["long"]) / 3600
    figures = {
        "same_rule_idle": same(parts["idle"]),
        "same_rule_loaded": same(parts["loaded"]),
        "changes_per_hour_loaded": round(sum(one["again"] for one in parts["long"]) / hours, 2) if hours else 0.0,
        "auto_over_best": max([row["auto_over_best"] for row in parts["links"].values()], default=0.0),
    }
    print(json.dumps(figures | parts))


if __name__ == "__main__":
    main()
