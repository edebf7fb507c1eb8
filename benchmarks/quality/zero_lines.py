# SPDX-License-Identifier: Apache-2.0
"""Ten programs that know nothing of paceline, on one worker and on several: do they end where they end alone?

    python benchmarks/quality/zero_lines.py [--workers 4] [--seeds 3] [--programs vae ..]
        [--out out/zero_lines] [--plot FILE]

Each program of `examples/zero_lines/` is run as `python FILE --seed S` and as `paceline run --workers N --rule RULE
FILE --seed S`, with nothing changed and with its own arguments as they are; what zero lines refuse is shown to be
refused, and run with its two lines. The first seed is run by real processes (`paceline run`), further ones by virtual
workers (`paceline sim`), which do the same one after another. The rule is `bmuf(period=4)` for SGD and
`bmuf_adam(period=4)` for Adam. Runs that are over are kept in `--out`. The last line is a JSON object: for each program
`rule`, `refused`, and `one` and `several`, a number a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "zero_lines"
SGD, ADAM = "bmuf(period=4)", "bmuf_adam(period=4)"
LIMIT_S = 3600.0
GOAL = 0.02


@dataclass(frozen=True)
class Program:
    """A program, and how several workers are to run it.

    Attributes:
        name: of the file.
        rule: that suits its optimizer.
        options: further ones of `paceline run`.
        two_lines: zero lines refuse it, and its twin with two lines is run.
    """

    name: str
    rule: str
    options: tuple[str, ...] = ()
    two_lines: bool = False

    @property
    def served(self) -> str:
        """The file that several workers run."""
        return f"{self.name}_two_lines" if self.two_lines else self.name


PROGRAMS = (
    Program("mnist_cnn", SGD),
    Program("word_language_model", ADAM, two_lines=True),
    Program("vae", ADAM),
    Program("super_resolution", ADAM),
    Program("siamese", ADAM),
    Program("time_sequence", ADAM),
    Program("gcn", ADAM, two_lines=True),
    Program("transformer", ADAM),
    Program("reinforce", ADAM, options=("--random-data",)),
    Program("mixed_precision", SGD),
)


def final(output: str) -> float:
    """The number that a program ends with; ValueError where it did not come so far."""
    found = re.findall(r"^(?:\[0\] )?final (?:loss|return) (-?\d+\.\d+)$", output, flags=re.MULTILINE)
    if not found:
        raise ValueError(f"no line `final loss 0.1234` in an output that ends with {output[-300:]!r}")
    return float(found[-1])


def behind(name: str, one: float, several: float) -> float:
    """How far several workers are behind one, as a share: of the loss above it, or of the return below it."""
    return 1 - several / one if name == "reinforce" else several / one - 1


class Runs:
    """Runs of programs, kept.

    Args:
        out: where they are kept, and where the programs leave their files.
        workers: of the cluster.
        epochs: of each program; None for its own.
    """

    def __init__(self, out: Path, workers: int, epochs: int | None) -> None:
        self._out, self._workers = out.resolve(), workers
        self._epochs = [] if epochs is None else ["--epochs", str(epochs)]

    def one(self, program: Program, seed: int) -> float:
        """What it ends with alone."""
        return final(self._kept(f"{program.name}-one-{seed}", [sys.executable, self._file(program.name)], seed))

    def several(self, program: Program, seed: int) -> float:
        """What it ends with on several workers."""
        by = "run" if seed == 1 else "sim"
        return final(self._kept(f"{program.name}-several-{seed}", self._cluster(program, program.served, by), seed))

    def refusal(self, program: Program) -> str:
        """What zero lines say to a program that they cannot serve."""
        folder = self._folder(f"{program.name}-refused")
        command = [*self._cluster(program, program.name), "--seed", "1"]
        done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=LIMIT_S)
        told = re.search(r"Refusal: .*: (\w+ steps, and no DataLoader[^:]*)", " ".join(done.stderr.split()))
        if done.returncode == 0 or told is None:
            raise RuntimeError(f"{program.name} was to be refused: {done.stderr[-1000:]}")
        return told[1]

    def _cluster(self, program: Program, name: str, by: str = "run") -> list[str]:
        start = [sys.executable, "-m", "paceline", by, "--workers", str(self._workers), "--rule", program.rule]
        return [*start, *program.options, self._file(name)]

    def _file(self, name: str) -> str:
        return str(FOLDER / f"{name}.py")

    def _folder(self, name: str) -> Path:
        folder = self._out / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _kept(self, name: str, command: list[str], seed: int) -> str:
        """Its output, of now or of before."""
        folder = self._folder(name)
        kept = folder / "output.txt"
        if not kept.exists():
            print(f"{name} ...", file=sys.stderr, flush=True)
            command = [*command, "--seed", str(seed), *self._epochs]
            done = subprocess.run(
                command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=LIMIT_S
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
            kept.write_text(done.stdout, encoding="utf-8")
        return kept.read_text(encoding="utf-8")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def table(found: dict[str, dict[str, Any]]) -> str:
    """A row a program, in Markdown."""
    rows = ["| program | rule | one worker | several | behind |", "| --- | --- | --- | --- | --- |"]
    for name, row in found.items():
        one, several = statistics.mean(row["one"]), statistics.mean(row["several"])
        lines = "two lines" if row["refused"] else "zero lines"
        cells = [
            f"{value:.4f} ({min(each):.4f} to {max(each):.4f})"
            for value, each in zip((one, several), (row["one"], row["several"]), strict=True)
        ]
        rows.append(
            f"| {name}, {lines} | `{row['rule']}` | {cells[0]} | {cells[1]} | {behind(name, one, several):+.1%} |"
        )
    return "\n".join(rows)


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """How far each program is behind: a dot a seed, a bar at the mean."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, row) in enumerate(found.items()):
        each = [100 * behind(name, *pair) for pair in zip(row["one"], row["several"], strict=True)]
        mean = 100 * behind(name, statistics.mean(row["one"]), statistics.mean(row["several"]))
        axes.plot(each, [place] * len(each), "o", color="C0", alpha=0.5, markersize=5)
        axes.plot([mean], [place], "|", color="black", markersize=16, markeredgewidth=2)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.axvline(100 * GOAL, color="C3", linewidth=1, linestyle=":")
    labels = [f"{name}{' (two lines)' if row['refused'] else ''}".replace("_", " ") for name, row in found.items()]
    axes.set_yticks(range(len(found)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("loss of 4 workers over that of one, % (dots: seeds; bar: the means; dotted: 2 %)")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--programs", nargs="+", choices=[program.name for program in PROGRAMS])
    parser.add_argument("--epochs", type=int, help="of each program, in place of its own")
    parser.add_argument("--out", type=Path, default=Path("out/zero_lines"))
    parser.add_argument("--plot", type=Path)
    args = _quick.parse(parser, seeds=1, workers=2, epochs=1, programs=["siamese"])
    runs = Runs(args.out, args.workers, args.epochs)
    chosen = [program for program in PROGRAMS if not args.programs or program.name in args.programs]
    found: dict[str, dict[str, Any]] = {
        program.name: {
            "rule": program.rule,
            "refused": runs.refusal(program) if program.two_lines else None,
            "one": [],
            "several": [],
        }
        for program in chosen
    }
    for seed in range(1, args.seeds + 1):
        for program in chosen:
            found[program.name]["one"].append(runs.one(program, seed))
            found[program.name]["several"].append(runs.several(program, seed))
    print(table(found))
    if args.plot:
        draw(found, args.plot)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
