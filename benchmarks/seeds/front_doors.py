# SPDX-License-Identifier: Apache-2.0
"""A program for one device on several workers, with paceline and others: lines, commands, seconds to the first step.

    python benchmarks/seeds/front_doors.py [--peer torchft=PYTHON] [--peer hivemind=PYTHON]
        [--repetitions 5] [--plot FILE]

`_front_doors/plain.py` is the program; beside it lies a version for each way, as that way's own documentation has it.
Lines are counted by difflib, of code alone. A start's seconds are from the launch of its commands, which are run as
they would be typed, to the end of the first optimizer step of the last worker; `_front_doors/marks` notes them from
outside of the program. The doors take turns, each repetition begins with the plain program alone, and ratios are to it.
What is not installed is skipped by name. Rows are kept in `--out`, so that it goes on where it was stopped; the last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
from _doors import ALONE, DOORS, PROGRAMS, Door, installed
from _doors_starts import NotStarted, Place, seconds, trained
from _doors_table import changed, draw, figures, markdown, with_range

ROOT = Path(__file__).resolve().parents[2]


class Kept:
    """Rows in a file, each written when it is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def has(self, **about: Any) -> bool:
        """Whether there is such a row."""
        return any(about.items() <= row.items() for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Keep it, and show it."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


class Bench:
    """All doors on this machine."""

    def __init__(self, out: Path, pythons: dict[str, str]) -> None:
        self.out, self.pythons = out, pythons
        out.mkdir(parents=True, exist_ok=True)
        self.kept = Kept(out / "rows.jsonl")
        self.versions = {door.package: installed(door.package, self.python(door)) for door in DOORS}
        for door in DOORS:
            if not self.versions[door.package]:
                print(f"{door.name}: {door.package} is not installed; skipped", flush=True)

    def python(self, door: Door) -> str:
        """The interpreter that a door's commands come with."""
        return self.pythons.get(door.package, sys.executable)

    def doors(self) -> list[Door]:
        """Those that are installed."""
        return [door for door in DOORS if self.versions[door.package]]

    def place(self, door: Door) -> Place:
        """A new folder."""
        folder = self.out / "start"
        shutil.rmtree(folder, ignore_errors=True)
        own = Path(sys.executable).parent
        paths = [Path(self.python(door)).parent, own]  # a peer's own commands, then what it shares with us
        path = os.pathsep.join([*map(str, paths), os.environ["PATH"]])
        sources = os.pathsep.join([str(PROGRAMS / "marks"), str(ROOT / "src")])
        return Place(folder, self.python(door), {"PATH": path, "PYTHONPATH": sources})

    def start(self, door: Door, workers: int, repetition: int) -> None:
        """Seconds to the marks, once."""
        about = {"what": "start", "door": door.name, "workers": workers, "repetition": repetition}
        if not self.kept.has(**about):
            self.kept.add(about | _tried(lambda: seconds(door, workers, self.place(door))))

    def train(self, door: Door, workers: int) -> None:
        """A whole training, once."""
        about = {"what": "training", "door": door.name, "workers": workers}
        if not self.kept.has(**about):
            self.kept.add(about | _tried(lambda: trained(door, workers, self.place(door))))

    def run(self, workers: Iterable[int], repetitions: int, trainings: bool = True) -> None:
        """All of it; whole trainings once, where they are asked for."""
        workers = list(workers)
        for repetition in range(repetitions):
            self.start(ALONE, 1, repetition)
            for count in workers:
                for door in self.doors():
                    self.start(door, count, repetition)
        for door, count in ((ALONE, 1), *((door, max(workers)) for door in self.doors())):
            if trainings:
                self.train(door, count)

    # -- what came out ----------------------------------------------------------------------------

    def rows(self, what: str, door: Door, workers: int) -> list[dict[str, Any]]:
        """Those that were no failures."""
        wanted = {"what": what, "door": door.name, "workers": workers}
        return [row for row in self.kept.rows if wanted.items() <= row.items() and "error" not in row]

    def about(self, door: Door, workers: list[int]) -> dict[str, Any]:
        """A door's figures."""
        plain = (PROGRAMS / ALONE.program).read_text(encoding="utf-8")
        added, removed = changed(plain, (PROGRAMS / door.program).read_text(encoding="utf-8"))
        most = max(workers)
        commands = [*([door.server(most)] if door.server else []), *door.workers(most)]
        found: dict[str, Any] = {
            "version": self.versions.get(door.package, ""),
            "lines": {"added": added, "removed": removed, "changed": added + removed},
            "commands": commands,
            "two_machines": door.hosts,
            "besides": door.besides,
        }
        one = {row["repetition"]: row for row in self.rows("start", ALONE, 1)}
        for count in workers:
            rows = [row for row in self.rows("start", door, count) if row["repetition"] in one]
            for mark in ("first", "exchange", "processor") if rows else ():
                alone = {number: row[mark] for number, row in one.items()}
                found.setdefault(str(count), {})[mark] = figures(rows, mark, alone)
        trainings = self.rows("training", door, most)
        failures = [row["error"][-300:] for row in self.kept.rows if row["door"] == door.name and "error" in row]
        return found | {"loss": trainings[0]["loss"] if trainings else None, "failures": failures}


def zero_over_ddp(bench: Bench, workers: int) -> float | None:
    """The first step with zero lines over that of DistributedDataParallel, in the same repetition; the median."""
    zero, ddp = (
        {row["repetition"]: row["first"] for row in bench.rows("start", door, workers)}
        for door in DOORS
        if door.name in ("paceline, zero lines", "PyTorch DDP")
    )
    ratios = [zero[number] / ddp[number] for number in zero.keys() & ddp.keys()]
    return round(statistics.median(ratios), 3) if ratios else None


def first_line_s(bench: Bench, door: Door) -> float:
    """Seconds from the launch of `paceline run` to the first line that it prints."""
    place, began = bench.place(door), time.monotonic()
    place.folder.mkdir()
    command = [place.python, "-m", "paceline", "run", "--workers", "2", str(PROGRAMS / door.program)]
    with subprocess.Popen(
        command, cwd=place.folder, env=place.variables(stop=False), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seconds = time.monotonic() - began
        process.terminate()
    return round(seconds, 3)


def _tried(what: Any) -> dict[str, Any]:
    try:
        return dict(what())
    except NotStarted as error:
        return {"error": str(error)}


def table(results: dict[str, Any], workers: list[int]) -> str:
    """For people."""
    header = ["", "lines", "commands"]
    header += [f"first step, {count} workers" for count in workers]
    header += [f"first exchange, {workers[-1]} workers", "processor seconds", f"loss, {workers[-1]} workers"]
    rows = []
    for name, one in results["doors"].items():
        row = [name, one["lines"]["changed"], len(one["commands"])]
        for count, mark, unit in [*((n, "first", "ratio") for n in workers), (workers[-1], "exchange", "ratio")]:
            row.append(with_range(one[str(count)][mark][unit]) if str(count) in one else "not run")
        last = one.get(str(workers[-1]))
        row += [with_range(last["processor"]["seconds"]) if last else "not run", one["loss"] or "not run"]
        rows.append(row)
    return markdown(header, rows)


def picture(results: dict[str, Any], workers: list[int], path: Path) -> None:
    """Seconds to the first step in multiples of the plain program's."""
    doors = {name: one for name, one in results["doors"].items() if str(workers[-1]) in one}
    bars = {
        f"{count} workers": [one[str(count)]["first"]["ratio"] if str(count) in one else None for one in doors.values()]
        for count in workers
    }
    draw(path, list(doors), bars, "time to the first step, in times of the plain program's on one device")


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="append", default=[], metavar="PACKAGE=PYTHON", help="where it is installed")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "front_doors")
    parser.add_argument("--plot", type=Path, help="a picture of the ratios")
    options = _quick.parse(parser, workers=[2], repetitions=1)
    bench = Bench(options.out.resolve(), dict(one.split("=", 1) for one in options.peer))
    bench.run(options.workers, options.repetitions, trainings=not options.quick)
    alone = bench.rows("start", ALONE, 1)
    results = {
        "alone": {mark: [row[mark] for row in alone] for mark in ("first", "processor")},
        "alone_loss": [row["loss"] for row in bench.rows("training", ALONE, 1)],
        "repetitions": options.repetitions,
        "doors": {door.name: bench.about(door, options.workers) for door in DOORS},
    }
    results["zero_over_ddp"] = zero_over_ddp(bench, max(options.workers))
    results["first_line_s"] = statistics.median(first_line_s(bench, DOORS[0]) for _ in range(options.repetitions))
    print(table(results, options.workers))
    if options.plot:
        picture(results, options.workers, options.plot)
    print(json.dumps(results))
    failures = {name: one["failures"] for name, one in results["doors"].items() if one["failures"]}
    if failures:
        raise SystemExit(f"doors that failed: {failures}")


if __name__ == "__main__":
    main()
