# SPDX-License-Identifier: Apache-2.0
"""Runs a program alone and on several workers, each in a fresh copy of its folder, with all that it does counted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tomllib

from _foreign import data

HERE = Path(__file__).resolve().parent
LIMIT_S = float(os.environ.get("FOREIGN_LIMIT_S", "120"))


@dataclass(frozen=True)
class Program:
    """A row of the table.

    Attributes:
        name: how the record calls it.
        file: below the folder of programs.
        arguments: its own.
        rule: for several workers, unless `Bench` has one for all.
        options: further ones of `paceline run`; `--` goes before its own arguments, some of which are called alike.
        data: what it looks for in files, as `data.make` has it.
        metric: a pattern; what it last matches in the output is the program's own figure.
        root: the folder that is copied; by default the program's.
        environment: variables beyond this process's.
        samples: how many pictures a stand-in's training set has.
        stand_ins: folders of `_foreign/others`, for PYTHONPATH.
        files: small ones that it looks for, such as configurations, below its folder: what is in each.
        of: the program whose door this is.
        what: for the record, what there is to say of it.
    """

    name: str
    file: str
    arguments: list[str] = field(default_factory=list)
    rule: str = "bmuf(period=4)"
    options: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    metric: str = ""
    root: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    samples: int = 600
    stand_ins: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    of: str = ""
    what: str = ""


def table(path: Path) -> list[Program]:
    """The programs of a table (TOML, an array `program`)."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["program"]
    return [Program(**row) for row in rows]


@dataclass(frozen=True)
class Done:
    """A run that is over.

    Attributes:
        code: its exit code; None where it ran into the limit.
        seconds: wall time.
        folder: with `counts`, `work` (where it ran), `out.txt` and `err.txt`.
        files: those that it left in `work`, below it.
    """

    code: int | None
    seconds: float
    folder: Path
    files: list[str]

    def output(self) -> str:
        """What it printed, and what was said on stderr."""
        return "\n".join((self.folder / name).read_text(encoding="utf-8", errors="replace") for name in OUTPUTS)


OUTPUTS = ("out.txt", "err.txt")
OF_SEVERAL = ("rule", "options", "metric", "of", "what")
"""What a program alone does not depend on."""


class Bench:
    """Runs programs.

    Args:
        programs: the folder with all of them.
        out: where runs are kept.
        workers: of the cluster.
        packages: what `pip install --target` put there is found by the programs.
        rule: for all programs that have one, instead of their own.
    """

    def __init__(self, programs: Path, out: Path, workers: int, packages: Path | None = None, rule: str = "") -> None:
        self._programs, self._out, self._workers, self._rule = programs.resolve(), out.resolve(), workers, rule
        self._packages = packages.resolve() if packages else None

    def alone(self, program: Program) -> Done:
        """As Python runs it; kept, since it does not change."""
        kept = self.kept(program, "alone")
        if kept is not None and kept.code == 0:
            return kept
        return self._run(program, "alone", [sys.executable, "-u"], {"FOREIGN_ALONE": "1"})

    def kept(self, program: Program, how: str) -> Done | None:
        """A run of before, alone or of several; None where there is none, or the table has changed since."""
        file = self._folder(program, how) / "done.json"
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"program": None}
        if found["program"] != _about(program):
            return None
        return Done(found["code"], found["seconds"], file.parent, found["files"])

    def several(self, program: Program) -> Done:
        """By `paceline run`."""
        log = self._folder(program, "several") / "log"
        rule = ["--rule", self._rule or program.rule] if program.rule else []
        start = [sys.executable, "-m", "paceline", "run", "--workers", str(self._workers), *rule, "--log", str(log)]
        options = [option for option in program.options if option != "--"]
        return self._run(program, "several", [*start, *options], {})

    def _folder(self, program: Program, how: str) -> Path:
        of = f"-{self._rule}" if how == "several" and self._rule else ""
        return self._out / program.name.replace("/", "+").replace(" ", "_") / f"{how}{of}"

    def _run(self, program: Program, how: str, start: list[str], added: dict[str, str]) -> Done:
        folder = self._folder(program, how)
        shutil.rmtree(folder, ignore_errors=True)
        root = Path(program.root) if program.root else Path(program.file).parent
        work = folder / "work" / "program"
        shutil.copytree(self._programs / root, work)
        script = work / Path(program.file).relative_to(root)
        for what in program.data:
            data.make(what, script.parent)
        for name, text in program.files.items():
            (script.parent / name).parent.mkdir(parents=True, exist_ok=True)
            (script.parent / name).write_text(text, encoding="utf-8")
        before = _files(folder / "work")
        began = time.monotonic()
        dashes = ["--"] if "--" in program.options and how == "several" else []
        code = _wait(
            [*start, script.name, *dashes, *program.arguments], script.parent, self._variables(program, folder, added)
        )
        seconds = time.monotonic() - began
        done = Done(code, seconds, folder, sorted(_files(folder / "work") - before))
        row = {"program": _about(program), "code": done.code, "seconds": done.seconds, "files": done.files}
        (folder / "done.json").write_text(json.dumps(row), encoding="utf-8")
        return done

    def _variables(self, program: Program, folder: Path, added: dict[str, str]) -> dict[str, str]:
        others = [HERE / "others" / name for name in program.stand_ins]
        pictures = [] if "hub" in program.stand_ins else [HERE / "stand_ins"]  # transformers would look into it
        paths = [HERE / "counting", *pictures, *others, folder / "work" / "program"]
        paths += [self._packages] if self._packages else []
        own = {
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            "FOREIGN_COUNTS": str(folder / "counts"),
            "FOREIGN_SAMPLES": str(program.samples),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
            "MPLBACKEND": "agg",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "cache"),
        }
        return {**os.environ, **own, **added, **program.environment}


def _about(program: Program) -> dict[str, object]:
    return {name: value for name, value in asdict(program).items() if name not in OF_SEVERAL}


def _files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def _wait(command: list[str], folder: Path, variables: dict[str, str]) -> int | None:
    """Its exit code; None after the limit, and then all that it started is over."""
    top = next(parent for parent in folder.parents if parent.name == "work").parent
    with contextlib.ExitStack() as files:
        out, err = (files.enter_context((top / name).open("wb")) for name in OUTPUTS)
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
