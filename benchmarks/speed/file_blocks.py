# SPDX-License-Identifier: Apache-2.0
"""What `paceline blocks` costs, and what becomes of a closed tool's model.

The cost: a tool that copies its model, of `--megabytes`, is run on `--workers` workers for `--blocks` blocks. Each
worker writes the model for the tool and reads its result; the workers merge them under bmuf, and write a checkpoint.
Counted are the processor seconds of rank 0's own process, without the tool, the median over the blocks after the first.

The quality: the trainer of `examples/file_blocks` (compiled with c++) trains by itself, one part of the data after
another, and on `--workers` workers by files, under averaging and bmuf, with the same samples and the same rates. The
figure is the held-out error over that of the trainer alone.

    python benchmarks/speed/file_blocks.py [--workers 4] [--megabytes 10] [--blocks 12] [--seeds 3]

The last line is a JSON object: `file_block_overhead_s`, `megabytes`, `workers`, `error_alone`, `error_ratio_averaging`
and `error_ratio_bmuf` (means over the seeds).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import numpy as np

TRAINER = Path(__file__).parents[2] / "examples" / "file_blocks" / "train.cc"
RATE, LAST_RATE = 0.05, 0.002


def blocks(folder: Path, model: str, workers: int, *options: object, tool: list[str]) -> list[dict[str, Any]]:
    """Run `paceline blocks` in a folder; the rows of its journal."""
    given = ["--model", model, "--layout", "f32", "--workers", workers, "--work", "work", "--overwrite", *options]
    command = [sys.executable, "-m", "paceline", "blocks", *map(str, given), "--quiet", "--", *tool]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    rows: list[dict[str, Any]] = json.loads((folder / "work" / "journal.json").read_text())["blocks"]
    return rows


def overhead_s(folder: Path, megabytes: float, workers: int, count: int) -> float:
    """Processor seconds of rank 0 for a block."""
    numbers = np.random.default_rng(0).standard_normal(round(megabytes * 1e6 / 4)).astype("f4")
    numbers.tofile(folder / "big.f32")
    tool = ["sh", "-c", "cp {model} {model_out} && : part {part}"]
    rows = blocks(folder, "big.f32", workers, "--epochs", count, tool=tool)
    return statistics.median(row["own_cpu_s"] for row in rows[1:])


class Trainer:
    """The closed trainer, and data for it.

    Args:
        folder: of its files.
        samples: to train on.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        self.folder = folder
        compiler = shutil.which("c++")
        if compiler is None:
            raise SystemExit("the example needs a compiler, and there is no c++ here")
        subprocess.run([compiler, "-O2", "-o", str(folder / "train"), str(TRAINER)], check=True)
        for name, count, seed in (("samples.txt", samples, 1), ("held_out.txt", 4000, 2)):
            (folder / name).write_text(self("--make-data", count, seed))

    def __call__(self, *words: object) -> str:
        """What it prints."""
        command = ["./train", *map(str, words)]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout

    def error(self, model: str) -> float:
        """Its held-out error."""
        found = re.search("error=([0-9.]+)", self("--in", model, "--held-out", "held_out.txt"))
        assert found is not None
        return float(found[1])

    def alone(self, seed: int, parts: int, epochs: int) -> float:
        """Train on one part after another; the held-out error."""
        lines = (self.folder / "samples.txt").read_text().splitlines(keepends=True)
        order = np.random.default_rng(seed)
        self("--init", seed, "alone.f32")
        for epoch in range(epochs):
            shuffled = [lines[k] for k in order.permutation(len(lines))]
            for part in range(parts):
                (self.folder / "part.txt").write_text("".join(shuffled[part::parts]))
                rate = RATE * (LAST_RATE / RATE) ** ((epoch * parts + part) / (epochs * parts))
                given = ("--in", "alone.f32", "--out", "alone.f32", "--samples", "part.txt")
                self(*given, "--lr", rate, "--seed", seed * 1000 + epoch * parts + part)
        return self.error("alone.f32")

    def by_files(self, seed: int, parts: int, epochs: int, workers: int, rule: str) -> float:
        """Train on several workers; the held-out error."""
        self("--init", seed, "model.f32")
        data = ("--data", "samples.txt", "--parts", parts, "--epochs", epochs, "--seed", seed)
        rates = ("--lr", RATE, "--lr-final", LAST_RATE, "--rule", rule)
        files = ["--in", "{model}", "--out", "{model_out}", "--samples", "{list}"]
        tool = ["./train", *files, "--lr", "{lr}", "--seed", "{seed}"]
        blocks(self.folder, "model.f32", workers, *data, *rates, tool=tool)
        return self.error("work/trained.f32")


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=10.0, help="of the model whose blocks are timed")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--parts", type=int, default=16, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=8)
    quick = {"workers": 1, "megabytes": 1.0, "blocks": 3, "seeds": 1, "samples": 400, "parts": 4, "epochs": 1}
    options = _quick.parse(parser, **quick)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cost = overhead_s(folder, options.megabytes, options.workers, options.blocks)
        print(f"{cost:.3f} processor seconds of a worker for a block of {options.megabytes:g} MB")
        trainer = Trainer(folder, options.samples)
        sizes = (options.parts, options.epochs)
        alone, ratios = list[float](), dict[str, list[float]]({"averaging": [], "bmuf": []})
        for seed in range(1, options.seeds + 1):
            alone.append(trainer.alone(seed, *sizes))
            for rule, found in ratios.items():
                found.append(trainer.by_files(seed, *sizes, options.workers, rule) / alone[-1])
            of_rules = ", ".join(f"{rule} {found[-1]:.3f} of it" for rule, found in ratios.items())
            print(f"seed {seed}: held-out error alone {alone[-1]:.4f}; {options.workers} workers: {of_rules}")
    figures = {f"error_ratio_{rule}": round(statistics.mean(found), 4) for rule, found in ratios.items()}
    about = {"megabytes": options.megabytes, "workers": options.workers, "error_alone": statistics.mean(alone)}
    print(json.dumps({"file_block_overhead_s": cost, **about, **figures}))


if __name__ == "__main__":
    main()
