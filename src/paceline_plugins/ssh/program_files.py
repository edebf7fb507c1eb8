# SPDX-License-Identifier: Apache-2.0
"""The files of the program that all hosts must have alike: which they are, their sums, an archive of them."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli.run.checks import LOGS
from paceline.cli.run.program import Program

MOST_BYTES = 64 << 20
MOST_FILES = 5_000
MOST_FILE_BYTES = 16 << 20
"""A larger file is data or a checkpoint; it is left out, and named."""
CODE = (".py", ".pyw", ".sh", ".so")
GIT_S = 20


@dataclass(frozen=True)
class ProgramFiles:
    """The program as the other hosts need it."""

    base: Path  # the folder to which the paths are relative; the program runs in it
    words: tuple[str, ...]  # the program's words on a command line there
    path: str = ""  # of the program itself; empty for a module that is installed
    sums: dict[str, str] = field(default_factory=dict)  # sha256 of each file, by path
    code: frozenset[str] = frozenset()  # those of the paths that are code
    too_much: str = ""  # why they are not copied; empty if they may be
    left_out: dict[str, int] = field(default_factory=dict)  # large files, with their sizes

    @property
    def copy(self) -> str:
        """The name of their copy on other hosts: the same for every run of this folder."""
        return f"{self.base.name or 'root'}-{hashlib.sha256(os.fsencode(self.base)).hexdigest()[:12]}"

    def archive(self, paths: Sequence[str]) -> bytes:
        """A compressed tar of some of the files."""
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as archive:
            for path in paths:
                archive.add(self.base / path, path, filter=_as_file)
        return target.getvalue()


def _as_file(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without this machine's user, whom other hosts may not know."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def collect(program: Program, folder: Path) -> ProgramFiles:
    """The files beside a program, where it lies in `folder` (the working directory), else in its own folder.

    A program that is found on PATH, and a module that is installed, have none: the hosts have their own.
    """
    is_module = program.words[0] == "-m"
    if is_module:
        top = _package(program)
        if top is None or not top.is_relative_to(folder):
            return ProgramFiles(folder, program.words)
        return _of(folder, top, str(top.relative_to(folder)), program.words)
    given = Path(program.words[0])
    if program.is_tool and given.is_absolute():
        return ProgramFiles(folder, program.words, str(given))
    file = Path(os.path.abspath(folder / given))
    base = folder if file.is_relative_to(folder) else file.parent
    path = str(file.relative_to(base))
    word = os.path.join(".", path) if program.is_tool else path
    return _of(base, file.parent, path, (word, *program.words[1:]))


def _package(program: Program) -> Path | None:
    """The folder of a module's outermost package, or its file."""
    if program.source is None or program.root is None:
        return None
    inner = program.source.resolve().relative_to(program.root.resolve()).parts
    return program.root.resolve() / inner[0]


def _of(base: Path, top: Path, path: str, words: tuple[str, ...]) -> ProgramFiles:
    sizes: dict[str, int] = {}
    logs = functools.cache(_is_log)
    for one in _listed(top):
        if one.is_file() and not any(logs(place) for place in one.parents if place.is_relative_to(top)):
            sizes[str(one.relative_to(base))] = one.stat().st_size
        if len(sizes) > MOST_FILES:
            break
    left_out = {name: size for name, size in sizes.items() if size > MOST_FILE_BYTES and name != path}
    kept = {name: size for name, size in sizes.items() if name not in left_out}
    total, too_much = sum(kept.values()), ""
    if len(sizes) > MOST_FILES or total > MOST_BYTES:
        count = f"more than {MOST_FILES}" if len(sizes) > MOST_FILES else str(len(kept))
        too_much = f"{top} has {count} files of {total / 2**20:.0f} MiB, the largest {max(kept, key=lambda k: kept[k])}"
    code = frozenset(name for name in kept if name == path or name.endswith(CODE))
    names = code if too_much else kept
    sums = {name: hashlib.sha256((base / name).read_bytes()).hexdigest() for name in sorted(names)}
    return ProgramFiles(base, words, path, sums, code, too_much, left_out)


def _listed(top: Path) -> Iterator[Path]:
    """The files of a folder: those that git would commit, else all but hidden ones, logs, caches and environments."""
    if top.is_file():
        yield top
        return
    known = _by_git(top)
    if known is not None:
        yield from known
        return
    for place, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if not _is_foreign(Path(place, name)))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith(".") and name[-4:] != ".pyc")


def _is_foreign(folder: Path) -> bool:
    """Whether a folder is no part of the program."""
    return folder.name.startswith(".") or folder.name in ("__pycache__", LOGS) or (folder / "pyvenv.cfg").exists()


def _is_log(folder: Path) -> bool:
    """Whether a folder holds the logs of a run, with its output and its certificates."""
    return next(folder.glob("rank-*.jsonl"), None) is not None


def _by_git(top: Path) -> list[Path] | None:
    """What git knows of a folder and does not ignore; None outside of a repository, or without git."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(top), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    return [top / name for name in sorted(set(names))] if done.returncode == 0 and names else None
