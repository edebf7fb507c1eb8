# SPDX-License-Identifier: Apache-2.0
"""From a program for one device to four workers on two machines: what is typed, what is changed, how long it takes.

    python benchmarks/seeds/way_in.py [--rounds 3]

Two machines are network namespaces with an sshd each (needs root); the program lies on the first, and nothing but
Python and torch on the second. Each way is typed as its documentation has it: its commands are run as they stand, in
so many terminals, until all four workers have made their first optimizer step, noted from outside by
`_front_doors/marks`. `_front_doors/plain.py` is the program, and the versions for the ways lie beside it; lines are
counted by difflib, of code alone. The ways take turns. Installing a package is counted as a command, and not timed: it
is the same for all.

JSON object: `ways` (by name: `commands`, `terminals`, `characters`, `added` and `removed` lines, `seconds` of each
round, `median_s`, `over_ddp`: its seconds over those of DDP in the same round, the median), `rounds`, `workers`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
from devtools.emulation.ssh_machines import Machines, machines, possible

PROGRAMS = Path(__file__).with_name("_front_doors")
SOURCE = Path(__file__).resolve().parents[2] / "src"
LESS = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
WORKERS, DEADLINE_S, LOOK_S = 4, 240.0, 0.05
NODES = "--nnodes 2 --nproc-per-node 2 --master-addr host0 --master-port 29500"
DDP = "PyTorch DDP, torchrun"


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        name: in the table.
        program: its version, in `_front_doors`.
        installs: commands that install a package; counted, not run.
        first: commands that are typed before, one after another.
        starts: commands that start the workers, a terminal each.
    """

    name: str
    program: str
    installs: Sequence[str]
    first: Sequence[str]
    starts: Sequence[str]

    @property
    def typed(self) -> list[str]:
        """All commands."""
        return [*self.installs, *self.first, *self.starts]


def both(package: str) -> list[str]:
    """The commands that install a package on both machines."""
    return [f"pip install {package}", f"ssh host1 pip install {package}"]


def agents(program: str) -> list[str]:
    """torchrun on both machines."""
    return [f"torchrun --node-rank 0 {NODES} {program}", f"ssh host1 torchrun --node-rank 1 {NODES} {program}"]


WAYS = (
    Way("paceline, zero lines", "plain.py", both("paceline"), [],
        ['paceline run --hosts host0,host1 --workers 2 --rule "bmuf(period=8)" plain.py']),
    Way("paceline, two lines", "paceline_two_lines.py", both("paceline"), [],
        ["paceline run --hosts host0,host1 --workers 2 paceline_two_lines.py"]),
    Way(DDP, "ddp.py", [], ["scp ddp.py host1:"], agents("ddp.py")),
    Way("accelerate, torchrun", "accelerate_local_sgd.py", both("accelerate"), ["scp accelerate_local_sgd.py host1:"],
        agents("accelerate_local_sgd.py")),
)  # fmt: skip


def environment(marks: Path) -> dict[str, str]:
    """Of the shells on both machines: the environment with torch is active, and the marks are written."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": f"{PROGRAMS / 'marks'}:{SOURCE}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "FRONT_DOORS_MARKS": str(marks),
        "FRONT_DOORS_STOP": "1",
    }


def seconds(way: Way, folder: Path) -> float:
    """From the first command until all workers have made their first step."""
    marks, project = folder / "marks", folder / "project"
    for place in (marks, project, folder / "machines"):
        place.mkdir()
    (project / way.program).write_bytes((PROGRAMS / way.program).read_bytes())
    shell = environment(marks)
    with machines(folder / "machines", 2, servers=[1], environment=shell) as two:
        shell["PATH"] = f"{two.folder / 'bin'}:{shell['PATH']}"
        began = time.monotonic()
        with typed(two, way, project, shell) as running:
            while len(list(marks.glob("first-*[0-9]"))) < WORKERS:
                broken = [process.args for process in running if process.poll() not in (None, 0)]
                if broken or time.monotonic() > began + DEADLINE_S:
                    raise RuntimeError(f"{way.name}: {broken or 'too late'}\n{(project / 'said').read_text()[-4000:]}")
                time.sleep(LOOK_S)
            return time.monotonic() - began


@contextlib.contextmanager
def typed(two: Machines, way: Way, project: Path, shell: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The commands as they are typed on the first machine; nothing is left of them at the end."""
    running: list[subprocess.Popen[bytes]] = []
    with (project / "said").open("wb") as said:

        def begin(command: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [*two.network.prefix(0), "bash", "-c", command], cwd=project, env={**os.environ, **shell}, stdout=said,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

        try:
            for command in way.first:
                if begin(command).wait(DEADLINE_S):
                    raise RuntimeError(f"{command} failed: {(project / 'said').read_text()[-2000:]}")
            running += [begin(command) for command in way.starts]
            yield running
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            two.close()


def code(text: str) -> list[str]:
    """The lines of a program that have code in them: no blank ones, no comments, no docstrings."""
    kept = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LESS:
            kept.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            kept.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return [line for number, line in enumerate(text.splitlines(), 1) if number in kept]


def changed(before: str, after: str) -> tuple[int, int]:
    """Lines of code added, and removed."""
    rows = [row[0] for row in difflib.ndiff(code(before), code(after))]
    return rows.count("+"), rows.count("-")


def figures(way: Way, found: Sequence[float], ddp: Sequence[float]) -> dict[str, Any]:
    """A row of the table."""
    added, removed = changed(*((PROGRAMS / name).read_text(encoding="utf-8") for name in ("plain.py", way.program)))
    return {
        "commands": len(way.typed),
        "terminals": len(way.starts),
        "characters": sum(map(len, way.typed)),
        "added": added,
        "removed": removed,
        "seconds": [round(one, 2) for one in found],
        "median_s": round(statistics.median(found), 2),
        "over_ddp": round(statistics.median(one / other for one, other in zip(found, ddp, strict=True)), 2),
    }


def main() -> None:
    """All ways, in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    options = _quick.parse(parser, rounds=1)
    reason = possible()
    if reason:
        raise SystemExit(f"way_in: {reason}")
    found: dict[str, list[float]] = {way.name: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder:
                found[way.name].append(seconds(way, Path(folder)))
            print(f"round {number}: {way.name}: {found[way.name][-1]:.1f} s", flush=True)
    rows = {way.name: figures(way, found[way.name], found[DDP]) for way in WAYS}
    print(f"\n{'way':24} commands terminals  lines  seconds  over DDP")
    for name, row in rows.items():
        lines = f"+{row['added']} -{row['removed']}"
        print(f"{name:24} {row['commands']:8} {row['terminals']:9} {lines:>6} {row['median_s']:8} {row['over_ddp']:9}")
    print(json.dumps({"ways": rows, "rounds": options.rounds, "workers": WORKERS}))


if __name__ == "__main__":
    main()
