# SPDX-License-Identifier: Apache-2.0
"""Storms in simulated worlds: how many seeds, what they found, and whether they find bugs that are planted.

    python benchmarks/faults/storm.py [--minutes 10] [--first 0] [--mutant-seeds 1500] [--jobs 2] [--out DIR] [--quick]

`--minutes` are shared by the control plane with its ledger (the most), whole elastic runs with models, whole
asynchronous runs, and lockstep runs that resume from checkpoint steps (`SHARES`). Then each planted bug of
`mutants.py`, `server_mutants.py` and `steps_mutants.py` in `devtools/storm` is looked for in at most `--mutant-seeds`
seeds of the kind of storm that has it.

The last line is a JSON object: `seeds` (of the control plane), `run_seeds` (of whole elastic runs), `server_seeds` (of
asynchronous runs), `steps_seeds` (of runs that resume from steps), `failed` and what failed seeds reported: samples
`lost` and `repeated`, models that `diverged`, runs that got `stuck`, and what was `else`; `faults` by kind; `mutants`
(name -> the first seed that found it, or null) and `mutants_found`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from devtools.storm.elastic import Outcome, StormSettings
from devtools.storm.mutants import MUTANTS, RUN_MUTANTS
from devtools.storm.seeds import WORKERS, Tally, chunk, storm, storms
from devtools.storm.server_mutants import SERVER_MUTANTS
from devtools.storm.steps_mutants import STEPS_MUTANTS

WORDS = {"lost": " lost", "repeated": " repeated", "diverged": "differ", "stuck": "stuck"}
SHARES = {"control": 0.62, "run": 0.16, "server": 0.13, "steps": 0.09}
"""Of the minutes."""
QUICK = {"control": 10, "run": 2, "server": 2, "steps": 2}  # seeds
QUICK_BUGS = {  # and the first seed that is tried
    "the record is not synced": 0,
    "a repeated exchange has lost the contribution": 0,
    "leases of a lost worker are not returned": 10,
    "problems of other workers are not heard": 0,
}
PLANTED = {
    **{name: ("control", plant) for name, plant in MUTANTS.items()},
    **{name: ("run", plant) for name, plant in RUN_MUTANTS.items()},
    **{name: ("server", plant) for name, plant in SERVER_MUTANTS.items()},
    **{name: ("steps", plant) for name, plant in STEPS_MUTANTS.items()},
}
"""Name -> the kind of storm that looks for it, and how it is planted."""


def parse() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--mutant-seeds", type=int, default=1500, help="at most, for each planted bug")
    parser.add_argument("--mutants", nargs="*", choices=list(PLANTED), default=list(PLANTED))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    return _quick.parse(parser, mutant_seeds=2, mutants=list(QUICK_BUGS))


def run(kind: str, args: argparse.Namespace) -> Tally:
    """The seeds of one kind of storm."""
    settings = StormSettings(kind, workers=WORKERS[kind])

    def told(tally: Tally) -> None:
        for one in tally.failed:
            print(f"{settings.kind} seed {one.seed}: {one.problems[0][:300]}", flush=True)

    if args.quick:  # a process for each kind takes longer than its storms
        return chunk(args.first, QUICK[kind], settings)[1]
    return storms(range(args.first, 1 << 31), settings, args.jobs, 60 * SHARES[kind] * args.minutes, told)


def what(outcomes: list[Outcome]) -> dict[str, int]:
    """What failed seeds reported, each counted once by its first problem."""
    found: Counter[str] = Counter(dict.fromkeys([*WORDS, "else"], 0))
    for one in outcomes:
        text = one.problems[0]
        found[next((name for name, word in WORDS.items() if word in text), "else")] += 1
    return dict(found)


def hunt(name: str, seeds: int, first: int = 0) -> int | None:
    """The first seed that finds a planted bug."""
    kind, plant = PLANTED[name]
    settings = StormSettings(kind, workers=WORKERS[kind])
    with plant():
        return next((seed for seed in range(first, first + seeds) if storm(seed, settings).problems), None)


def main() -> None:
    """Run the seeds, and plant the bugs."""
    args = parse()
    torch.set_num_threads(1)
    tallies = {kind: run(kind, args) for kind in SHARES}
    logging.disable(logging.CRITICAL)
    mutants = {name: hunt(name, args.mutant_seeds, QUICK_BUGS[name] if args.quick else 0) for name in args.mutants}
    for name, seed in mutants.items():
        print(f"{name:55} {'not found' if seed is None else f'found by seed {seed}'}", flush=True)
    failed = [outcome for tally in tallies.values() for outcome in tally.failed]
    result = {
        "seeds": tallies["control"].seeds,
        **{f"{kind}_seeds": tally.seeds for kind, tally in tallies.items() if kind != "control"},
        "exchanges": sum(tally.exchanges for tally in tallies.values()),
        "failed": len(failed),
        **what(failed),
        "faults": dict(sorted(sum((tally.faults for tally in tallies.values()), Counter()).items())),
        "mutants": mutants,
        "mutants_found": sum(seed is not None for seed in mutants.values()),
    }
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "storm.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
