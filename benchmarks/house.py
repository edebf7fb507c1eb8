# SPDX-License-Identifier: Apache-2.0
"""Is the house in order? Counts what makes a source tree hard to find one's way in, and names the worst of each.

    python benchmarks/house.py [--check] [--tests]

Lines, files and the entries of the root are those of the core, `src/paceline`; all else is counted in the wings, too.

- Circles are those of imports, also of imports inside functions and of those under TYPE_CHECKING: between rooms (each
  folder of the root, and each loose file there) and between single modules. Of names that all lead to each other one
  circle is told, the shortest. What an `__init__.py` shows of its own folder ties no rooms together.
- Methods are what a class defines itself; a property and its setter are one.
- A constructor's width are the parameters of `__init__` without self (`*args` is one), or of a dataclass without one
  the fields that it is given, those of its bases included. A dataclass that has no method but properties, class
  methods, static ones and those with two underscores is a record: it only keeps what it was given, and has a figure of
  its own, without a limit.
- Calls that ask for a family: `is_asynchronous(..)`, `is_block(..)`, and `isinstance(..)` of a transport or of what
  tells the families of rules apart (`FAMILIES`), wherever the rules do not ask it of themselves. Questions for other
  parts of a rule have a figure of their own, without a limit.

With `--tests`, `make test` and `make test-all` are run and timed. With `--check` the exit code is 1 where a limit is
broken. The last line is a JSON object: `core_lines`, `files`, `root_entries`, `largest_class_methods`, `largest_file`,
`widest_constructor`, `circles`, `is_family_calls`, `readme_characters`, `test_seconds` and `test_all_seconds` (null
where they were not measured), and without limits `core_code_lines` (neither empty nor comment nor docstring),
`widest_record`, `folder_circles`, `is_part_calls`.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import _quick
from _house_classes import Class, all_parameters, classes, descendants
from _house_imports import Graph, Import, between_modules, between_rooms, circles, imports, modules, room

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "paceline"
RULES = "rules"
"""The folder of the rules."""
ASKING = ("is_asynchronous", "is_block")
TRANSPORT = "Transport"
FAMILIES = ("EveryStep", "EveryBlock", "Bounded", "Sharded", "Arrival")
"""Parts by which rules of gradients, of blocks and of workers that exchange by themselves are told apart."""

WIDTH = 100
"""Characters of the table's last column, at most."""


@dataclass(frozen=True)
class Offender:
    """Something that counts, and where it stands."""

    count: int
    name: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.name}  {self.place}" if self.place else self.name


@dataclass
class Figure:
    """A row of the table.

    Attributes:
        name: as in the JSON object.
        now: the figure; None where it was not measured.
        limit: the most that it may be; None where there is no limit.
        offenders: what makes it so large, the worst first; those beyond the limit are named.
        each: whether the limit is for each of them, and not for their number.
    """

    name: str
    now: float | None
    limit: float | None = None
    offenders: list[Offender] = field(default_factory=list)
    each: bool = False

    @property
    def broken(self) -> bool:
        """Whether it is beyond its limit."""
        return self.limit is not None and self.now is not None and self.now > self.limit

    @property
    def beyond(self) -> list[Offender]:
        """Those who have to change."""
        if not self.broken or self.limit is None:
            return []
        return [one for one in self.offenders if one.count > self.limit] if self.each else self.offenders


@dataclass(frozen=True)
class House:
    """A source tree.

    Attributes:
        root: of the repository.
        core: dotted name -> file, of the package.
        wings: the same of the distributions in `wings/`.
    """

    root: Path
    core: dict[str, Path]
    wings: dict[str, Path]

    @property
    def files(self) -> dict[str, Path]:
        """Core and wings."""
        return {**self.core, **self.wings}

    @property
    def package(self) -> Path:
        """The folder of the core."""
        return self.root / "src" / PACKAGE


def house(root: Path) -> House:
    """What stands in a repository: the core in `src/`, and the wings."""
    wings = {
        name: path
        for package in sorted((root / "wings").glob("*/src/*"))
        if package.is_dir()
        for name, path in modules(package).items()
    }
    return House(root, modules(root / "src" / PACKAGE), wings)


def _second(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


# -- figures -----------------------------------------------------------------------------------------------------------


def size(here: House) -> list[Figure]:
    """How much there is, and the longest file."""
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in here.files.values()}
    of_core = sum(lines[path] for path in here.core.values())
    entries = sorted(entry.name for entry in here.package.iterdir() if entry.is_file() or any(entry.rglob("*.py")))
    long = [Offender(count, str(path.relative_to(here.root))) for path, count in lines.items()]
    return [
        Figure("core_lines", of_core, 50_000),
        Figure("core_code_lines", sum(map(code_lines, here.core.values()))),
        Figure("files", len(here.core)),
        Figure("root_entries", len(entries), 20, [Offender(len(entries), ", ".join(entries))]),
        _largest("largest_file", long, 400),
    ]


def code_lines(path: Path) -> int:
    """Lines of a file that are neither empty nor all comment or docstring."""
    text = path.read_text(encoding="utf-8")
    said: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            said |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for number, line in lines if number not in said and line.strip() and not line.lstrip().startswith("#"))


def _largest(name: str, found: Sequence[Offender], limit: float | None) -> Figure:
    rows = sorted(found, key=lambda one: (-one.count, one.name))
    return Figure(name, rows[0].count if rows else 0, limit, rows, each=True)


def of_classes(known: Sequence[Class]) -> list[Figure]:
    """Methods, constructors and records."""
    wide, records = list[Offender](), list[Offender]()
    for one in known:
        parameters = all_parameters(one, known)
        (records if one.record else wide).append(Offender(len(parameters), one.name, one.place))
    methods = [Offender(len(one.methods), one.name, one.place) for one in known]
    return [
        _largest("largest_class_methods", methods, 25),
        _largest("widest_constructor", wide, 7),
        _largest("widest_record", records, None),
    ]


def in_circles(here: House) -> list[Figure]:
    """Imports that lead back."""
    files = here.files
    found = imports(files)
    rooms, folders = between_rooms(found, files, 1), between_rooms(found, files)

    def told(graph: Graph, of: Callable[[str], str]) -> list[Offender]:
        return [Offender(1, " -> ".join(way), _why(way, found, of)) for way in circles(graph)]

    alone = told(between_modules(found), lambda module: module)
    among = told(rooms, lambda module: room(module, files, 1))
    deeper = told(folders, lambda module: room(module, files))
    return [
        Figure("circles", len(among) + len(alone), 0, [*among, *alone]),
        Figure("folder_circles", len(deeper), None, deeper),
    ]


def _why(way: Sequence[str], found: Sequence[Import], of: Callable[[str], str]) -> str:
    """An import for each step of a circle."""
    steps = []
    for source, target in itertools.pairwise(way):
        ties = [one for one in found if (of(one.source), of(one.target)) == (source, target)]
        one = min(ties, key=lambda one: (one.how != "", one.how, one.source, one.line))
        steps.append(f"{one.source}:{one.line}{f' ({one.how})' if one.how else ''}")
    return "; ".join(steps)


def questions(here: House, known: Sequence[Class]) -> list[Figure]:
    """Code that asks what it has before it."""
    transports = descendants(TRANSPORT, known)
    families = transports | {name for one in FAMILIES for name in descendants(one, known)}
    others = {one.name for one in known if _room_of(one.path) != RULES}
    of_rules = {one.name for one in known} - others  # a name that stands for two things tells nothing
    asked, parts = list[Offender](), list[Offender]()
    for module, path in here.files.items():
        if _second(module) == RULES:
            continue
        for line, name, kinds in _asks(path):
            place = f"{path.relative_to(here.root)}:{line}"
            if name in ASKING:
                asked.append(Offender(1, name, place))
            elif kinds & families:
                asked.append(Offender(1, f"isinstance {', '.join(sorted(kinds & families))}", place))
            elif kinds & of_rules:
                parts.append(Offender(1, f"isinstance {', '.join(sorted(kinds & of_rules))}", place))
    asked.sort(key=lambda one: (one.name, one.place))
    return [Figure("is_family_calls", len(asked), 0, asked), Figure("is_part_calls", len(parts), None, parts)]


def _room_of(path: str) -> str:
    """`rules` of `src/paceline/rules/codec/int8.py`."""
    parts = path.split("/")
    return parts[2].removesuffix(".py") if len(parts) > 2 else ""


def _asks(path: Path) -> Iterator[tuple[int, str, set[str]]]:
    """Line, name and asked classes of each call that asks."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Name, ast.Attribute)):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        if name in ASKING:
            yield node.lineno, name, set()
        elif name == "isinstance" and len(node.args) == 2:
            words = list(ast.walk(node.args[1]))
            kinds = {word.id for word in words if isinstance(word, ast.Name)}
            yield node.lineno, name, kinds | {word.attr for word in words if isinstance(word, ast.Attribute)}


def readme(root: Path) -> Figure:
    """The first page."""
    path = root / "README.md"
    return Figure("readme_characters", len(path.read_text(encoding="utf-8")) if path.is_file() else 0, 9_000)


def measure(root: Path) -> list[Figure]:
    """All figures but the times of tests."""
    here = house(root)
    known = classes(here.files, root)
    return [*size(here), *of_classes(known), *in_circles(here), *questions(here, known), readme(root)]


def timed(root: Path, target: str, limit_s: float, run: bool) -> Figure:
    """Seconds of a target of the Makefile, where it has this one and it is to be run."""
    name = f"{target.replace('-', '_')}_seconds"
    text = (root / "Makefile").read_text(encoding="utf-8") if (root / "Makefile").is_file() else ""
    if not run or not re.search(rf"^{target}:", text, re.MULTILINE):
        return Figure(name, None, limit_s)
    began = time.monotonic()
    code = subprocess.call(["make", target], cwd=root, stdout=sys.stderr)
    seconds = round(time.monotonic() - began, 1)
    return Figure(name, seconds, limit_s, [Offender(0, "passed" if code == 0 else f"failed with exit code {code}")])


# -- what is printed ---------------------------------------------------------------------------------------------------


def show(figures: Sequence[Figure]) -> None:
    """The table, and everyone beyond a limit."""
    print(f"{'figure':24} {'now':>8} {'limit':>8}    worst")
    for one in figures:
        now = "-" if one.now is None else f"{one.now:g}" if one.now < 1e5 else f"{one.now:.0f}"
        limit = "-" if one.limit is None else f"{one.limit:g}"
        worst = "not measured" if one.now is None else str(one.offenders[0]) if one.offenders else ""
        print(f"{one.name:24} {now:>8} {limit:>8} {'! ' if one.broken else '  '} {worst[:WIDTH]}".rstrip())
    for one in figures:
        if one.beyond:
            print(f"\n{one.name} beyond {one.limit:g}: {len(one.beyond)}")
        for offender in one.beyond:
            print(f"  {offender.count:5d}  {offender}" if one.each else f"  {offender}")
        if one.limit is None and one.offenders and not one.each:
            print(f"\n{one.name}, without a limit: {len(one.offenders)}")
            for offender in one.offenders:
                print(f"  {offender}")


def as_json(figures: Sequence[Figure]) -> Mapping[str, float | None]:
    """Name -> figure."""
    return {one.name: one.now for one in figures}


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository")
    parser.add_argument("--tests", action="store_true", help="run `make test` and `make test-all`, and time them")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a limit is broken")
    options = _quick.parse(parser, tests=False)
    figures = measure(options.root.resolve())
    figures += [timed(options.root, "test", 360, options.tests), timed(options.root, "test-all", 1500, options.tests)]
    show(figures)
    print(json.dumps(as_json(figures)))
    return int(options.check and any(one.broken for one in figures))


if __name__ == "__main__":
    raise SystemExit(main())
