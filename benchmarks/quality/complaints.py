# SPDX-License-Identifier: Apache-2.0
"""Small programs after public complaints about other tools: does any of them end silently wrong on several workers?

    python benchmarks/quality/complaints.py [NAME ..] [--rule sync] [--jobs 2] [--out out/complaints]

Each program of `_complaints/` is run unchanged by `paceline run` on real processes, under the rules that matter to it,
and as `python FILE` in one process that does the whole job: with `sync` on the batches of all workers at once. It
prints what it saw, drew and ended with; that is compared, never what paceline itself counted. A cell is `right`;
`refused`, where the run ends with another exit code than 0 and paceline's own message; `warned`, where paceline names
what differs; `documented`, where no run can see it and the page of limits says it; or in capitals SILENT, CRASH or
STUCK. `--quick` takes one program. The last line is a JSON object:
`programs` (name -> `complaint`, `kind`, `about`, `cells`) and `verdicts` (verdict -> how many cells).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
from _complaints import data, ends, numerics, schedules, state  # noqa: F401 (they register their programs)
from _complaints.cases import CASES, Case, Seen

BATCH = 4
QUICK = ["gradient_penalty"]
OURS = re.compile(r"paceline\.[\w.]+: |^(?:\[\d+\] )?paceline: ", re.MULTILINE)
LIMITS = Path(__file__).resolve().parents[2] / "docs" / "guide" / "limits.md"
USUAL = re.compile(r"split among|for evaluation: all|workers under")


def run(command: list[str], work: Path, batch: int, parts: int, limit_s: float) -> tuple[int | None, str]:
    """(exit code or None where it is stuck, stderr); stdout goes to `out.txt`."""
    mine = {"COMPLAINT_BATCH": str(batch), "COMPLAINT_PARTS": str(parts), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    if "run" not in command:
        mine["COMPLAINT_ALONE"] = "1"
    with (work / "out.txt").open("w") as out, (work / "err.txt").open("w") as err:
        process = subprocess.Popen(
            command,
            cwd=work,
            env={**os.environ, **mine},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # so that what it has started ends with it
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait() and None
    return code, (work / "err.txt").read_text(errors="replace")


def notes(path: Path) -> dict[str, Any]:
    """What a process noted, later values over earlier ones."""
    found: dict[str, Any] = {}
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("@note "):
            found.update(json.loads(line[6:]))
    return found


def folder(out: Path, name: str, case: Case) -> Path:
    """A new folder with the program in it."""
    work = out.resolve() / f"{case.name}-{name}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    (work / "train.py").write_text(case.source, encoding="utf-8")
    return work


def judged(case: Case, rule: str, out: Path) -> dict[str, Any]:
    """A cell: `verdict`, `why`, what paceline `told`, and the `seconds` on several workers."""
    parts = case.workers if case.whole and rule.startswith("sync") else 1
    name = re.sub(r"\W+", "-", rule)
    alone = folder(out, f"{name}-alone", case)
    code, err = run([sys.executable, "train.py"], alone, BATCH * parts, parts, case.limit_s)
    if code != case.code:
        raise RuntimeError(f"{case.name} by itself ended with {code}: {err[-1000:]}")
    work, begun = folder(out, name, case), time.monotonic()
    start = [sys.executable, "-m", "paceline", "run", "--workers", str(case.workers), "--rule", rule, "--log", "log"]
    code, err = run([*start, "--timeout", "30", "train.py"], work, BATCH, 1, case.limit_s)
    err += "".join(path.read_text(errors="replace") for path in sorted((work / "log" / "output").glob("rank-*.err")))
    told = [line[:300] for line in err.splitlines() if OURS.search(line) and not USUAL.search(line)]
    workers = [notes(path) for path in sorted((work / "log" / "output").glob("rank-*.out"))]
    verdict, why = verdict_of(case, Seen(rule, workers, notes(alone / "out.txt")), code, told, err)
    return {"verdict": verdict, "why": why, "told": told[:3], "seconds": round(time.monotonic() - begun, 1)}


def verdict_of(case: Case, seen: Seen, code: int | None, told: list[str], err: str) -> tuple[str, str]:
    if code is None:
        return "STUCK", f"no end within {case.limit_s:g} s"
    if case.fails:
        return ("right", "") if code else ("SILENT", "exit code 0")
    if code != case.code:
        return ("refused", f"exit code {code}") if told else ("CRASH", f"exit code {code}: {err.strip()[-200:]}")
    for check in case.checks:
        if wrong := check(seen):
            if case.said and re.search(case.said, err):
                return "warned", wrong
            return "documented" if case.page and case.page in LIMITS.read_text("utf-8") else "SILENT", wrong
    return "right", ""


def row(case: Case, cells: dict[str, dict[str, Any]]) -> str:
    """Of the table, in Markdown."""
    verdicts = ", ".join(f"`{rule}` {cell['verdict']}" for rule, cell in cells.items())
    if len({cell["verdict"] for cell in cells.values()}) == 1:
        verdicts = f"{next(iter(cells.values()))['verdict']} ({', '.join(f'`{rule}`' for rule in cells)})"
    why = "; ".join(dict.fromkeys(cell["why"] for cell in cells.values() if cell["why"])).replace("|", "/")
    return f"| {case.name} | {case.complaint} | {case.about} | {verdicts} | {' '.join(why.split())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of programs; all of them by default")
    parser.add_argument("--rule", default="", help="only under rules that begin so")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument("--out", type=Path, default=Path("out/complaints"))
    args = _quick.parse(parser, names=QUICK, rule="sync")
    if unknown := set(args.names) - {case.name for case in CASES}:
        parser.error(f"no program is called {', '.join(sorted(unknown))}")
    chosen = [case for case in CASES if not args.names or case.name in args.names]
    print("| program | complaint | about | verdict | what differs |\n| --- | --- | --- | --- | --- |")
    found: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            (
                case,
                {rule: pool.submit(judged, case, rule, args.out) for rule in case.rules if rule.startswith(args.rule)},
            )
            for case in chosen
        ]
        for case, cells in runs:
            done = {rule: cell.result() for rule, cell in cells.items()}
            print(row(case, done), flush=True)
            found[case.name] = {"complaint": case.complaint, "kind": case.kind, "about": case.about, "cells": done}
    verdicts = Counter(cell["verdict"] for program in found.values() for cell in program["cells"].values())
    print(json.dumps({"programs": found, "verdicts": verdicts}))


if __name__ == "__main__":
    main()
