# SPDX-License-Identifier: Apache-2.0
"""Can every claim still be made? Runs the quick form of each benchmark and of each record's command.

    python benchmarks/claims.py [records/NAME ..] [benchmarks/FOLDER/NAME.py ..] [--jobs 3] [--show]

A record's command is its `run.sh`, which is run with `--quick` in a copy: the record stays as it is. (What made some
records is in the history alone; their README names the commit.) A benchmark that no record runs is run by itself. A
claim can no longer be made when

    a command ends with another exit code than 0, or takes longer than its deadline;
    a benchmark does not end with one line of JSON;
    a key that the benchmark's docstring promises for it, that the record's own JSON has at its top, or that a
    document quotes (`` `benchmarks/FOLDER/NAME.py` `key` ``) is not in it.

What cannot be made on this machine (no root for network namespaces, no espeak-ng) is named and left out. The last line
is a JSON object: `ran`, `skipped` (command -> reason), `failed` (command -> what is wrong), `seconds`.
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
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS, RECORDS = ROOT / "benchmarks", ROOT / "records"
FOLDERS = ("quality", "speed", "faults", "seeds")
"""Of benchmarks, by question."""
TOOLS = {
    "speed/c_tool": "c++",
    "speed/c_tool_workers": "c++",
    "speed/file_blocks": "c++",
}
"""What a benchmark needs beside Python, by its folder and name."""
ROOTED = (
    *("speed/forecast", "speed/network"),
    *("faults/faults", "faults/sites"),
)
"""Benchmarks of network namespaces alone."""
PROMISE = re.compile(r"JSON object:(.*)", re.DOTALL)
QUOTED = re.compile(r"`(?:python )?benchmarks/(\w+/\w+)\.py(?: [^`]*)?`((?:,? (?:and )?`[\w.]+`)+)")
KEY = re.compile(r"[a-z]\w*(?:\.\w+)*")


@dataclass
class Claim:
    """A command, and what came of it.

    Attributes:
        name: what is run, from the project's root.
        wrong: why the claim can no longer be made.
        skipped: why it cannot be made here.
        figures: (name of the benchmark, name of the result) -> its last line.
        seconds: that it took.
    """

    name: str
    wrong: list[str] = field(default_factory=list)
    skipped: str = ""
    figures: dict[tuple[str, str], Any] = field(default_factory=dict)
    seconds: float = 0.0


# -- what there is ----------------------------------------------------------------------------------------------------


def benchmarks() -> list[str]:
    """All of them, by folder and name."""
    paths = sorted(path for folder in FOLDERS for path in (BENCHMARKS / folder).glob("[!_]*.py"))
    return [f"{path.parent.name}/{path.stem}" for path in paths]


def named(command: str) -> str:
    """The benchmark of `benchmarks/FOLDER/NAME.py`."""
    return command.removeprefix("benchmarks/").removesuffix(".py")


def records() -> list[str]:
    """Those with a command; of the others the README names the commit that has it."""
    return sorted(path.parent.name for path in RECORDS.glob("*/run.sh"))


def used_by(record: str) -> dict[str, list[str]]:
    """The benchmarks that a record's command runs, and the results that it keeps of each."""
    text = (RECORDS / record / "run.sh").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {name: [] for name in re.findall(r"benchmarks/(\w+/\w+)\.py", text)}
    for name, result in re.findall(r"\bbench (\w+/\w+) ([\w-]+|\"\$1\")", text):
        found.setdefault(name, []).append(result)
    return found


def wanted(given: list[str]) -> list[str]:
    """The commands: records first, then the benchmarks that none of them runs."""
    if given:
        return given
    inside = {name for record in records() for name in used_by(record)}
    alone = [name for name in benchmarks() if name not in inside]
    return [*(f"records/{name}" for name in records()), *(f"benchmarks/{name}.py" for name in alone)]


def missing_here(names: Iterable[str]) -> str:
    """Why these benchmarks cannot be run on this machine; empty where they can."""
    for name in names:
        tool = TOOLS.get(name)
        if tool is not None and shutil.which(tool) is None:
            return f"{name}.py needs {tool}"
        if name in ROOTED and (os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None):
            return f"{name}.py needs root and iproute2"
    return ""


# -- running ----------------------------------------------------------------------------------------------------------


def copy_for(place: Path) -> None:
    """A folder that looks like the project's root, in which records and `out/` may be written."""
    for path in ROOT.iterdir():
        if path.name not in ("records", "out", ".git"):
            (place / path.name).symlink_to(path)
    shutil.copytree(RECORDS, place / "records", ignore=shutil.ignore_patterns("quick", "__pycache__"))


def run(claim: Claim, place: Path, deadline_s: float, show: bool) -> None:
    """Run it in the copy, and read what it printed."""
    record = claim.name.partition("records/")[2].rstrip("/")
    command = ["bash", f"records/{record}/run.sh", "--quick"] if record else [sys.executable, claim.name, "--quick"]
    mine = {"PACELINE_CLAIMS": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    mine["PYTHONDONTWRITEBYTECODE"] = ""  # no process compiles what another one has
    mine["PYTHONPATH"] = os.pathsep.join(
        map(str, [ROOT / "tests" / "startup", ROOT / "src", *sorted((ROOT / "packages").glob("*/src")), ROOT])
    )
    process = subprocess.Popen(
        command,
        cwd=place,
        env={**os.environ, **mine},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what it has started ends with it
    )
    try:
        told, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        told, _ = process.communicate()
        claim.wrong.append(f"takes longer than {deadline_s:g} s")
    if show:
        print(told, flush=True)
    if process.returncode:
        tail = "\n".join(told.splitlines()[-12:])
        claim.wrong.append(f"ends with exit code {process.returncode}; it printed last:\n{tail}")
    elif record:
        for name, path in results_of(place / "records" / record, record):
            claim.figures[name, path.stem] = last_line(path.read_text(encoding="utf-8"))
    else:
        claim.figures[named(claim.name), ""] = last_line(told)


def results_of(folder: Path, record: str) -> Iterator[tuple[str, Path]]:
    """The results that the quick form has left, each with its benchmark."""
    for name, results in used_by(record).items():
        for path in sorted((folder / "quick").glob("*.json")):
            if path.stem in results or '"$1"' in results:
                yield name, path


def last_line(text: str) -> Any:
    """The JSON of the last line; None where it is none."""
    try:
        return json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None


# -- keys -------------------------------------------------------------------------------------------------------------


def promised(name: str) -> set[str]:
    """The keys that a benchmark's docstring promises for its last line."""
    text = (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    told = PROMISE.search(text)
    words = re.findall(r"`([^`]+)`", told[1].split("\n\n")[0]) if told else []
    return {word for word in words if KEY.fullmatch(word)}


def quoted() -> dict[str, set[str]]:
    """The keys that documents quote, by benchmark."""
    found: dict[str, set[str]] = {}
    for path in (
        ROOT / "README.md",
        *(ROOT / "docs").glob("*/*.md"),
        *(ROOT / "packages").glob("*/docs/*.md"),
        *RECORDS.glob("*/README.md"),
    ):
        for name, keys in QUOTED.findall(path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).update(re.findall(r"`([\w.]+)`", keys))
    return found


def has(figures: Any, key: str) -> bool:
    """Whether `key` (of a dotted path, in which words in capitals stand for any key) is anywhere in the figures."""
    first, _, rest = key.partition(".")
    if isinstance(figures, list):
        return any(has(one, key) for one in figures)
    if not isinstance(figures, dict):
        return False
    if first.isupper() and not figures:  # a table of names that has none this time
        return True
    inner = [value for name, value in figures.items() if name == first or first.isupper()]
    return any(not rest or has(value, rest) for value in inner) or any(has(one, key) for one in figures.values())


def gone(claim: Claim, of_documents: dict[str, set[str]]) -> Iterator[str]:
    """What is missing in the figures of a claim."""
    together: dict[str, list[Any]] = {}
    for (name, result), figures in claim.figures.items():
        if not isinstance(figures, dict):
            yield f"benchmarks/{name}.py does not end with a JSON object"
            continue
        together.setdefault(name, []).append(figures)
        kept = ROOT / claim.name / f"{result}.json"
        before = last_line(kept.read_text(encoding="utf-8")) if result and kept.is_file() else None
        named = isinstance(before, dict) and not all(isinstance(value, dict) for value in before.values())
        for key in sorted(before.keys() - figures.keys() if named else ()):  # a table by names may be shorter
            yield f"benchmarks/{name}.py: `{key}`, which {claim.name}/{result}.json has, is gone"
    for name, made in together.items():
        for key in sorted(promised(name) | of_documents.get(name, set())):
            if not has(made, key):
                yield f"benchmarks/{name}.py: nothing has `{key}`, which its docstring or a document quotes"


# -- all of it --------------------------------------------------------------------------------------------------------


def tried(name: str, place: Path, deadline_s: float, show: bool) -> Claim:
    """One command from its beginning to its end."""
    claim, began = Claim(name), time.monotonic()
    record = name.partition("records/")[2].rstrip("/")
    if record and not (RECORDS / record / "run.sh").is_file():
        claim.wrong.append("has no run.sh")
        return claim
    claim.skipped = missing_here(used_by(record) if record else [named(name)])
    if not claim.skipped:
        run(claim, place, deadline_s, show)
        if not claim.wrong:
            claim.wrong.extend(gone(claim, quoted()))
    claim.seconds = time.monotonic() - began
    told = f"skipped: {claim.skipped}" if claim.skipped else "; ".join(claim.wrong) or "ok"
    print(f"{name:44} {claim.seconds:6.1f} s  {told}", flush=True)
    return claim


def main() -> int:
    """Try all claims, and say which can no longer be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="records/NAME or benchmarks/FOLDER/NAME.py; all if left out")
    parser.add_argument("--jobs", type=int, default=3, help="at a time")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds for one of them")
    parser.add_argument("--show", action="store_true", help="what they print")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-claims-") as folder:
        copy_for(Path(folder))
        with ThreadPoolExecutor(options.jobs) as pool:
            trying = partial(tried, place=Path(folder), deadline_s=options.deadline, show=options.show)
            claims = list(pool.map(trying, wanted(options.names)))
    failed = {claim.name: claim.wrong for claim in claims if claim.wrong}
    skipped = {claim.name: claim.skipped for claim in claims if claim.skipped}
    ran = len(claims) - len(skipped)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"ran": ran, "skipped": skipped, "failed": failed, "seconds": seconds}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
