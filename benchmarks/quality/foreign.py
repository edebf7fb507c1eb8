# SPDX-License-Identifier: Apache-2.0
"""Programs that were written elsewhere, with zero lines on several workers: what they do is counted, not supposed.

    python benchmarks/quality/foreign.py --programs FOLDER --table FILE.toml [--workers 3] [--rule RULE]
        [--only NAME ..]
    python benchmarks/quality/foreign.py --quick

Each program of the table is run as `python FILE ARGUMENTS` and as `paceline run --workers N --rule RULE FILE
ARGUMENTS`, in a fresh copy of its folder. `_foreign/counting` is loaded into each process by Python itself and notes
which samples were fetched, which steps were made at which rates, and what was saved and written, without paceline's
knowledge. `_foreign/stand_ins` has a torchvision with small pictures. `_foreign/judge.py` says what has to hold; where
it does not, the verdict begins with WRONG or LOOK. `--quick` takes programs of `examples/zero_lines`. The last line is
a JSON object: `workers`, and `programs`, by name, each with its `verdict` and what was counted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from _foreign.judge import judged
from _foreign.runs import Bench, Program, table

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "zero_lines"
FINAL = r"final loss (-?\d+\.\d+)"
QUICK = [
    Program("vae", "vae.py", ["--epochs", "1"], rule="bmuf_adam(period=4)", metric=FINAL),
    Program("gcn", "gcn.py", ["--epochs", "1"], metric=FINAL),
]


def row(name: str, found: dict[str, Any]) -> str:
    """Of the table, in Markdown."""
    drawn = "; ".join(
        f"{data} {each['trained']} + {each['evaluated']}: {'/'.join(map(str, each['workers']))}"
        for data, each in found["samples"].items()
    )
    made = "; ".join(
        f"{optimizer} {count}: {'/'.join(map(str, found['steps']['workers'][optimizer]))}"
        for optimizer, count in found["steps"]["alone"].items()
    )
    figures = " ".join("" if number is None else f"{number:.4g}" for number in found["figure"])
    return f"| {name} | {found['verdict']} | {drawn} | {made} | {figures} |"


def arguments(about: str | None, workers: int, out: str) -> argparse.ArgumentParser:
    """Those of benchmarks of a table of programs."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, help="the folder that the table's files are in")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--packages", type=Path, help="a folder of `pip install --target`")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--workers", type=int, default=workers)
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def main() -> None:
    parser = arguments(__doc__, 3, "out/foreign")
    parser.add_argument("--rule", default="", help="for all programs, instead of the table's")
    parser.add_argument("--kept", action="store_true", help="run nothing: judge the runs in --out once more")
    parser.add_argument("--quick", action="store_true", help="programs of examples/zero_lines")
    args = parser.parse_args()
    if not args.quick and (args.programs is None or args.table is None):
        parser.error("give --programs and --table, or --quick")
    rows, workers = (QUICK, 2) if args.quick else (table(args.table), args.workers)
    bench = Bench(EXAMPLES if args.quick else args.programs, args.out, workers, args.packages, args.rule)
    print("| program | verdict | samples alone, for training + evaluation: workers | steps alone: workers | figure |")
    print("| --- | --- | --- | --- | --- |")
    counted: dict[str, Any] = {}
    for program in rows:
        if args.only and not any(only in program.name for only in args.only):
            continue
        several = bench.kept(program, "several") if args.kept else bench.several(program)
        if several is None:
            continue
        found = judged(program, bench.alone(program), several)
        counted[program.name] = found
        print(row(program.name, found), flush=True)
    print(json.dumps({"workers": workers, "programs": counted}))


if __name__ == "__main__":
    main()
