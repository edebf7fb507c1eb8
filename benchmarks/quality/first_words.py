# SPDX-License-Identifier: Apache-2.0
"""What a user reads of paceline in a first run of programs that others wrote, and how soon a mistake is refused.

    python benchmarks/quality/first_words.py [--programs FOLDER --table FILE.toml] [--only NAME ..] [--quick]

Each program of the table (by default two of `examples/zero_lines`) runs with zero lines under `auto`. A line of ours is
one that no worker wrote. Of three tries of a refusal the fastest counts. The last line is a JSON object:
`lines_of_ours` (median of the runs), `runs_with_loss` (summaries that name a loss), `runs`, `seconds_to_refusal` (the
slowest), `refusals` (seconds of each), `programs` (lines, exit code).
"""

from __future__ import annotations

import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
from _foreign.runs import OUTPUTS, Bench, table
from foreign import EXAMPLES, QUICK, arguments

LOSS = re.compile(r"^\d+ workers? finished: .*loss -?\d")


def lines_of_ours(folder: Path) -> list[str]:
    """Of a run, what no worker wrote."""
    files = (folder / "log" / "output").glob("rank-*")
    theirs = {line.rstrip() for file in files for line in re.split(r"[\r\n]", file.read_text(errors="replace"))}
    shown = "\n".join((folder / name).read_text(errors="replace") for name in OUTPUTS).split("\n")
    return [line for line in shown if line.strip() and line.rsplit("\r", 1)[-1].rstrip() not in theirs]


def seconds_to_refusal(place: Path, port: int) -> dict[str, float]:
    """What a launcher refuses -> the seconds until it has."""
    (place / "wrong.py").write_text("import torch\ndef f(:\n")
    (place / "binary.py").write_bytes(Path(sys.executable).read_bytes()[:4000].replace(b"\x7fELF", b"\0ELF"))
    (place / "right.py").write_text("import torch\n")
    (place / "file").touch()
    refused = {"syntax": "wrong.py", "binary": "binary.py", "rule": "--rule bmuf(period=0) right.py"}
    refused |= {"log": "--log file/log right.py", "metrics": f"--metrics {port} right.py"}
    refused["port"] = f"--hosts 2 --host-index 0 --master 127.0.0.1:{port} right.py"
    found = dict.fromkeys(refused, 1e9)
    for name, options in [*refused.items()] * 3:
        began, command = time.monotonic(), [sys.executable, "-m", "paceline", "run", "--workers", "2", *options.split()]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True)
        found[name] = min(found[name], round(time.monotonic() - began, 2))
        if done.returncode != 2 or "starting" in done.stderr:
            raise SystemExit(f"{name} was not refused: {done.stderr}")
    return found


def main() -> None:
    args = _quick.parse(arguments(__doc__, 2, "out/first_words"), table=None, programs=None, only=["gcn"])
    bench = Bench(args.programs or EXAMPLES, args.out, args.workers, args.packages, "auto")
    programs, losses = {}, 0
    for program in table(args.table) if args.table else QUICK:
        if args.only and program.name not in args.only:
            continue
        ours = lines_of_ours((done := bench.several(program)).folder)
        losses += any(LOSS.match(line) for line in ours)
        programs[program.name] = {"lines": len(ours), "code": done.code}
        print(f"{program.name}: exit code {done.code}, {len(ours)} lines of ours", *ours, sep="\n    ", flush=True)
    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0)) as taken:
        refusals = seconds_to_refusal(Path(place), taken.getsockname()[1])
    found = {"lines_of_ours": statistics.median(one["lines"] for one in programs.values()), "runs_with_loss": losses}
    found |= {"seconds_to_refusal": max(refusals.values()), "refusals": refusals, "runs": len(programs)}
    print(json.dumps(found | {"programs": programs}))


if __name__ == "__main__":
    main()
