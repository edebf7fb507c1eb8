# SPDX-License-Identifier: Apache-2.0
"""paceline beside torch, torchft, hivemind and accelerate: the same model, loop and emulated links, in one run.

Each worker is a process of one thread on a host of its own: a network namespace whose cable to a switch is shaped
(veth, `tc tbf`) to 100 Mbit/s or 1 Gbit/s. What a library needs beside the workers, torchft's lighthouse and hivemind's
first peer, runs on one more host. All libraries train a model of 1.28 million fp32 parameters, 5.12 MB, in 16 layers,
whose computing is a timed wait of 60 ms a step (`_emulate.py`): so two cores can stand for eight workers, and the
links, not the cores, are what is measured. `idle` says where that fails. All exchange fp32 but the row that says 4 bit;
a block has 16 steps. `_peers/rows.py` lists the rows and what each needs. The columns, the last two counted by the
kernel and not by any library:

    step_ms        a step at the workers' mean pace; a block's exchange is spread over its steps
    exposed_ms     how long training waits for an exchange (of a step, or of a block), beyond the step of the row
                   `no_exchange` of the same round
    processor_ms   processor time of all of a worker's processes, an exchange, beyond that of `no_exchange`
    sent_mb        what left a worker's interface, a step, headers included (of a large packet of TCP, one)

    python benchmarks/seeds/peers.py [--workers 2 4 8] [--rates 100 1000] [--rounds 5] [--rows ddp paceline_sync]

Run it with an interpreter that has the libraries; a row whose library is missing is skipped, and named.

The last line is a JSON object: `medians` (network -> row -> column, over the rounds), `rounds` (all of them, raw),
`skipped` (row -> the library that is missing), `failed` (row and network -> why, once a round that failed), `versions`,
`setting`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

os.environ |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")} | {
    "TORCH_CPP_LOG_LEVEL": "ERROR"
}

import _quick
from _network import EmulatedNetwork
from _peers.figures import medians, of_run, table
from _peers.fleet import Fleet, RowError
from _peers.measure import measure
from _peers.rows import ALL, NOTHING, ROWS
from _peers.setting import Setting

MODULES = {
    "torch": ("torch.distributed.fsdp", "torch.nn.parallel"),
    "torchft": ("torchft.local_sgd", "torchft.coordination"),
    "hivemind": ("hivemind",),
    "accelerate": ("accelerate.local_sgd",),
    "paceline": ("paceline",),
}
PACKAGES = ("torch", "torchft-nightly", "torchft", "hivemind", "accelerate")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2, 4, 8])
    add("--rates", type=float, nargs="+", default=[100.0, 1000.0], help="of each link, each direction, Mbit/s")
    add("--rounds", type=int, default=5)
    add("--rows", nargs="+", choices=list(ALL), default=list(ROWS))
    add("--parameters", type=int, default=1_280_000)
    add("--layers", type=int, default=16)
    add("--compute-ms", type=float, default=60.0, help="of the emulated accelerator, a step")
    add("--period", type=int, default=16, help="steps of a block")
    add("--fragments", type=int, default=4, help="of the streaming rows")
    add("--steps", type=int, default=6, help="measured, of rows that exchange at every step")
    add("--blocks", type=int, default=2, help="measured, of the others")
    add("--row-timeout", type=float, default=120.0, help="seconds after which a row is given up")
    add("--more", type=Path, help="result of an earlier run, whose rounds are kept")
    add("--logs", type=Path, help="folder for what the workers print, and where they were when a row was given up")
    quick: dict[str, Any] = {"workers": [2], "rates": [1000.0], "rounds": 1, "more": None}
    return _quick.parse(parser, **quick, parameters=64_000, compute_ms=10.0, steps=3, blocks=1)


def load(options: argparse.Namespace) -> dict[str, str]:
    """Import the libraries of the rows, so that a forked worker has them; row -> why it is skipped."""
    options.rows = [NOTHING, *(name for name in options.rows if name != NOTHING)]
    skipped = {name: ALL[name].missing() for name in options.rows if ALL[name].missing()}
    options.rows = [name for name in options.rows if name not in skipped]
    for library in {ALL[name].library for name in options.rows}:
        for module in MODULES[library]:
            importlib.import_module(module)
    return skipped


class Results:
    """The rounds of all networks, and what could not be measured.

    Args:
        earlier: the last line of an earlier run, whose rounds are kept.
    """

    def __init__(self, options: argparse.Namespace, earlier: dict[str, Any]) -> None:
        self._options = options
        self.rounds: dict[str, list[dict[str, dict[str, float]]]] = earlier.get("rounds", {})
        self.failed: dict[str, list[str]] = earlier.get("failed", {})
        self.medians: dict[str, dict[str, dict[str, float | None]]] = earlier.get("medians", {})

    def measure(self, workers: int, rate: float) -> None:
        """All rounds on one network; its table."""
        options, key = self._options, f"{workers} workers, {rate:g} Mbit/s"
        sizes = (options.parameters, options.layers, options.compute_ms, options.period, options.fragments)
        setting = Setting(*sizes, rate, options.steps, options.blocks)
        rounds = self.rounds.setdefault(key, [])
        with EmulatedNetwork(workers + 1, rate) as network, tempfile.TemporaryDirectory() as folder:
            fleet = Fleet(network, workers, options.logs or Path(folder), options.row_timeout)
            for turn in range(options.rounds):
                names = options.rows if turn % 2 == 0 else [NOTHING, *options.rows[:0:-1]]
                rows = self._round(fleet, setting, names, key)
                if NOTHING in rows:
                    rounds.append(rows)
        self.medians[key] = medians(rounds)
        wire_ms = 1e3 * 2 * (workers - 1) / workers * 4 * options.parameters / (rate * 1e6 / 8)
        print(f"\n{key}; on the wire alone a sum of the model takes {wire_ms:.1f} ms")
        found = self.medians[key]
        print(table({name: found[name] for name in options.rows if name in found}), flush=True)

    def _round(self, fleet: Fleet, setting: Setting, names: list[str], key: str) -> dict[str, dict[str, float]]:
        """Every row once."""
        rows = {}
        for name in names:
            try:
                rows[name] = of_run(fleet.run(partial(measure, name, setting), ALL[name].service))
                print(f"{name:24} {1e3 * rows[name]['step_s']:8.1f} ms", file=sys.stderr, flush=True)
            except RowError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                self.failed.setdefault(f"{name}, {key}", []).append(str(error))
        return rows


def versions() -> dict[str, str]:
    """Of what is measured."""
    found = {"python": platform.python_version(), "linux": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Measure on each network, and print the tables."""
    options = parse()
    reason = EmulatedNetwork.possible()
    if reason:
        raise SystemExit(f"no network can be emulated here: {reason}")
    skipped = load(options)
    for name, why in skipped.items():
        print(f"{name} is skipped: {why}")
    earlier = json.loads(options.more.read_text().splitlines()[-1]) if options.more else {}
    results = Results(options, earlier)
    for workers in options.workers:
        for rate in options.rates:
            results.measure(workers, rate)
    kept = ("parameters", "layers", "compute_ms", "period", "fragments", "steps", "blocks")
    setting = {name: getattr(options, name) for name in kept} | {"cores": os.cpu_count()}
    found = {"medians": results.medians, "rounds": results.rounds, "failed": results.failed, "skipped": skipped}
    print(json.dumps({**found, "versions": versions(), "setting": setting}))


if __name__ == "__main__":
    main()
