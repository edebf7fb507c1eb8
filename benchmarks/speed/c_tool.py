# SPDX-License-Identifier: Apache-2.0
"""A training tool in C++: what changes in it, and what the library costs (`c_tool_workers.py` trains it).

A small tool in C makes steps of about 5 ms inside a block, 8 with `pl_step` and 8 without. Two processes exchange an
array through the C library and one as large through `attach_arrays` in turn.

    python benchmarks/speed/c_tool.py [--pairs 60] [--megabytes 100] [--exchanges 9]

The last line is a JSON object: `changed_lines` of the tool, `step_overhead` (median, over all pairs of runs, of the
ratio of the thread's processor seconds) and `sync_ratio` (ratio of the medians of an exchange).
"""

from __future__ import annotations

import argparse
import ctypes
import difflib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import numpy as np
from _c_tools import EXAMPLE, HERE, compile_example, on_workers, told
from _workers import answer, is_worker, launch

import paceline
from paceline_c.build import Place

WARM = 2


def changed_lines() -> int:
    """Lines of the example that are new, changed or gone; a changed line counts once."""
    before, after = ((EXAMPLE / name).read_text().splitlines() for name in ("train.cc", "train_paceline.cc"))
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in changes if kind != "equal")


def compile_tools(place: Place, folder: Path) -> None:
    """The library, the example, and the tool of 5 ms."""
    compile_example(place, folder)
    steps = [str(HERE / "_c_tool" / "steps.c"), *place.cflags(), *place.libs(), "-o", str(folder / "steps")]
    told(["cc", "-O2", *steps])


def step_overhead(folder: Path, pairs: int, workers: int) -> list[float]:
    """Processor seconds of a step, and over it those of a step with `pl_step`: the median and the quartiles."""
    said = on_workers(workers, [str(folder / "steps"), str(pairs)], folder)
    return [float(word) for word in said.partition("ANSWER ")[2].split()]


def worker(prefix: Path, megabytes: float, exchanges: int) -> None:
    """Exchange through C and through Python in turn."""
    library = ctypes.CDLL(str(Place(prefix).library))
    size = int(megabytes * 1e6 / 4)
    through_c, through_python = np.zeros(size, np.float32), np.zeros(size, np.float32)
    rule = "averaging(period=1)"
    run = paceline.attach_arrays([through_python], rule)
    place, sizes = (ctypes.c_void_p * 1)(through_c.ctypes.data), (ctypes.c_int64 * 1)(size)
    if library.pl_attach(1, place, sizes, (ctypes.c_int * 1)(1), b"cpu", rule.encode()) < 0:
        library.pl_error.restype = ctypes.c_char_p
        raise SystemExit(library.pl_error().decode())
    rows: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * (exchanges + WARM)):
        (through_python, through_c)[number % 2][:8] += 1 + run.world.rank
        began = time.perf_counter()
        (run.step, library.pl_step)[number % 2]()
        if number >= 2 * WARM:
            rows[number % 2].append(time.perf_counter() - began)
    assert (through_c == through_python).all()
    library.pl_close()
    run.close()
    answer({"python_s": statistics.median(rows[0]), "c_s": statistics.median(rows[1])})


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60, help="of 8 steps without, and as many with pl_step")
    parser.add_argument("--megabytes", type=float, default=100.0, help="of an exchange")
    parser.add_argument("--exchanges", type=int, default=9, help="through C, and as many through Python")
    parser.add_argument("--prefix", type=Path, help=argparse.SUPPRESS)
    options = _quick.parse(parser, pairs=5, megabytes=1.0, exchanges=5)
    if is_worker():
        worker(options.prefix, options.megabytes, options.exchanges)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="paceline-c-tool-") as scratch:
        folder = Path(os.environ.get("C_TOOL", scratch))
        compile_tools(Place(folder / "prefix"), folder)
        step_s, overhead, *between = step_overhead(folder, options.pairs, 1 if options.quick else 2)
        sizes = ["--megabytes", str(options.megabytes), "--exchanges", str(options.exchanges)]
        sync = launch(__file__, [*sizes, "--prefix", str(folder / "prefix")], 2, 600)
    lines, ratio = changed_lines(), sync["c_s"] / sync["python_s"]
    print(f"lines of the tool that changed {lines}")
    print(f"a step {1e3 * step_s:.3f} ms, with pl_step {overhead:.4f} times ({between[0]:.4f} to {between[1]:.4f})")
    print(f"an exchange through Python {sync['python_s']:.3f} s, through C {sync['c_s']:.3f} s  ({ratio:.3f} times)")
    print(json.dumps({"changed_lines": lines, "step_overhead": round(overhead, 4), "sync_ratio": round(ratio, 4)}))


if __name__ == "__main__":
    main()
