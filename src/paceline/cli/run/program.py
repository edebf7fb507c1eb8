# SPDX-License-Identifier: Apache-2.0
"""What a worker runs: a Python program, a Python module, or any executable. Recognised before anything starts.

A file's first bytes decide, not its name: ELF is an executable; `#!` is one unless its interpreter is Python; all else
has to be Python. An executable without a slash in its name may also lie on PATH.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import sys
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.console import refuse
from paceline.cli.console.program_options import own_arguments
from paceline.errors import PacelineError
from paceline.extensions import STARTERS, extension

ELF, SHEBANG = b"\x7fELF", b"#!"
HEAD_BYTES = 4096
ELF_PROGRAMS = (2, 3)
"""The field e_type of ELF: a program, and one that the loader may place anywhere (or a shared library)."""
SOURCES, COMPILED = (".py", ".pyw"), (".pyc", ".pyz")
MOST_SOURCE_BYTES = 16 << 20
FUNCTION = "paceline.run.launch"
"""The module that calls a function for `paceline.launch`; its arguments are a folder and the function's name."""
_PYTHON = re.compile(r"(python|pypy)[\d.]*\w?")
_PIP_WRAPPER = b"\n'''exec' "  # of pip, where Python's path is too long for #!


@functools.cache
def starter() -> Any:
    """The plugin that starts unchanged programs: `serves` decides for which, `environment` prepares their workers."""
    return extension(STARTERS, "zero")


@dataclass(frozen=True)
class Program:
    """A program and its arguments.

    Attributes:
        name: for messages.
        words: that name it on a command line: `train.py`, `-m package.module`, `./tool`.
        arguments: its own.
        source: its file of Python code; None for an executable.
        root: the folder of its own modules; None: that of `source`.
    """

    name: str
    words: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    source: Path | None = None
    root: Path | None = None

    @property
    def is_tool(self) -> bool:
        """Whether it is an executable, not Python."""
        return self.source is None

    @property
    def typed(self) -> list[str]:
        """The program and its arguments, as on the command line of `paceline run`."""
        return [*self.words, *self.arguments]

    def command(self, zero_lines: bool = False) -> list[str]:
        """The command of a worker, by way of the plugin where the program has zero lines of ours."""
        if self.is_tool:
            return self.typed
        return [*(starter().ZERO_LINES if zero_lines else (sys.executable, "-u")), *self.typed]


def find(script: Path, arguments: Sequence[str] | None = None, module: bool = False) -> Program:
    """The program that a command line names; refuses what no worker could run.

    Args:
        script: a file, or a module's dotted name.
        arguments: its own; without a `--` in front.
        module: whether `script` is a module, as with Python's `-m`.
    """
    own = tuple(own_arguments(list(arguments or ())))
    if module:
        try:
            source, root = starter().find_module(str(script))
        except PacelineError as error:
            refuse(str(error))
        is_executable(source)
        name = own[1] if str(script) == FUNCTION and len(own) > 1 else str(script)
        return Program(name, ("-m", str(script)), own, source, root)
    if not script.is_file():
        result = shutil.which(script.name) if str(script) == script.name and not script.exists() else None
        if result is None:
            what = "is not a file" if script.exists() else "does not exist"
            refuse(f"the program {script} {what} (looked in {Path.cwd()})")
        return Program(script.name, (result,), own)
    if not is_executable(script):
        return Program(script.name, (str(script),), own, script)
    return Program(script.name, (os.path.join(".", script),), own)


def python_program(script: Path, arguments: Sequence[str] | None, what: str) -> Program:
    """As `find`, where a command runs Python in its own way: refuses executables."""
    program = find(script, arguments)
    if program.is_tool:
        refuse(f"{what}, and {script} is an executable that is not Python; paceline run starts it")
    return program


def is_executable(path: Path) -> bool:
    """Whether the file is an executable other than a Python program; refuses a file that is neither."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        if os.access(path, os.X_OK):  # a program that may be run, and not be read
            return True
        refuse(f"the program {path} cannot be read ({error.strerror})")
    if head.startswith(ELF):
        _check_elf(path, head)
        return True
    if path.suffix.lower() in COMPILED or head.startswith(importlib.util.MAGIC_NUMBER):
        return False
    if path.suffix.lower() in SOURCES:
        check_source(path)
        return False
    if head.startswith(SHEBANG):
        words = _interpreter(head)
        if _is_python(words) or _PIP_WRAPPER in head:
            check_source(path)
            return False
        _check_permission(path)
        if words and words[0].startswith("/") and not os.path.exists(words[0]):
            refuse(f"the first line of {path} names {words[0]!r}, which this machine does not have; correct it")
        return True
    if problem := "" if zipfile.is_zipfile(path) else _no_python(path):
        refuse(f"the program {path} is neither Python ({problem}) nor an executable (ELF or #!): give one of these")
    return False


def _check_elf(path: Path, head: bytes) -> None:
    kind = int.from_bytes(head[16:18], "big" if head[5:6] == b"\x02" else "little")
    if kind not in ELF_PROGRAMS:
        refuse(f"{path} is an ELF file, and no program (an object file, or a core): link it first")
    _check_permission(path)


def _check_permission(path: Path) -> None:
    if not os.access(path, os.X_OK):
        refuse(f"the program {path} may not be executed: chmod +x {path}")


def _interpreter(head: bytes) -> list[str]:
    """The words after `#!`, without `env`, its options and its variables."""
    line = head.split(b"\n", 1)[0].removeprefix(SHEBANG).decode(errors="replace")
    words = line.strip(" \t").split(" ")
    if os.path.basename(words[0]) != "env":
        return words
    return [word for word in words[1:] if word and not word.startswith("-") and "=" not in word]


def _is_python(words: Sequence[str]) -> bool:
    return bool(words) and _PYTHON.fullmatch(os.path.basename(words[0].strip())) is not None


def check_source(path: Path) -> None:
    """Refuse a Python program that does not compile, which each worker would only find after loading torch."""
    if problem := "" if zipfile.is_zipfile(path) else _no_python(path):
        refuse(f"the program {path} is not valid Python ({problem}): correct it")


def _no_python(path: Path) -> str:
    """Why a file is no Python program; empty if it may be one."""
    if path.stat().st_size > MOST_SOURCE_BYTES:
        return f"it has more than {MOST_SOURCE_BYTES >> 20} MiB"
    source = path.read_bytes()
    if b"\0" in source:
        return "it holds null bytes, as binary files do"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        if not isinstance(error, SyntaxError):
            return str(error)
        text = (error.text or "").strip()
        return f"line {error.lineno or '?'}: {error.msg}" + (f": {text[:80]}" if text else "")
    return ""
