# SPDX-License-Identifier: Apache-2.0
"""Is the source tree small enough to hold? Measures it against its budgets, and names the worst of each figure.

    python benchmarks/house/house.py [--check] [--lower] [--tests]

`budget.txt` beside this file has three columns: a figure, its goal, and the most that it may be today. `--check` exits
with 1 where a figure is above both its goal and today's limit. `--lower` writes today's figures into the last column
where they are lower; nothing raises them. The last line is a JSON object: `core_lines`, `files`, `longest_function`,
`widest_function`, `circles`, `folder_circles`, `single_protocols`, `late_assignments`, `benchmark_lines`,
`guide_words`, `options`, `readme_characters`, and more.

- Lines are all lines of `*.py`. A room is a folder of `src/paceline`; `root` is the files beside them.
- A function's length excludes its docstring; its width is its parameters without `self` and `cls`.
- Circles are those of imports between modules and between rooms, imports inside functions and under `TYPE_CHECKING`
  included; folder circles are those between folders of any depth.
- A single Protocol is one that at most one class of the source tree implements by its members.
- A late assignment sets an attribute that a class of another folder owns, on an object other than `self`.
- Options are those of all commands of the wheel. `guide_words` are the words of `docs/guide/`.
"""

from __future__ import annotations

import argparse
import ast
import collections
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from imports import Graph, Import, between_modules, between_rooms, circles, imports, modules, room

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, PLUGINS = "paceline", "paceline_plugins"
DIALECT = re.compile(r"\b(found|said|told|brings|stands|anew|storm|wings?|doors?|left out|whoever)\b", re.IGNORECASE)
"""Words of our own where the field has one: `docs` and code say detected, reported, sent, place, package."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Offender:
    """What counts towards a figure, and where it is."""

    count: int
    name: str
    place: str = ""


@dataclass
class Figure:
    """A row of the table: a count, or the largest of its offenders."""

    name: str
    now: float | None
    offenders: list[Offender] = field(default_factory=list)


@dataclass(frozen=True)
class Tree:
    """A source tree: dotted name -> file and parsed file, of the core, of the plugins and of the packages."""

    root: Path
    core: dict[str, Path]
    others: dict[str, Path]
    parsed: dict[Path, ast.Module]

    def place(self, path: Path, line: int) -> str:
        """`file:line` below the root."""
        return f"{path.relative_to(self.root)}:{line}"


def read(root: Path) -> Tree:
    """Parse the source of a repository."""
    core = modules(root / "src" / PACKAGE)
    others = modules(root / "src" / PLUGINS)
    for package in sorted((root / "packages").glob("*/src/*")):
        others |= modules(package) if package.is_dir() else {}
    parsed = {path: ast.parse(path.read_text(encoding="utf-8")) for path in {**core, **others}.values()}
    return Tree(root, core, others, parsed)


# -- lines -------------------------------------------------------------------------------------------------------------


def lines(paths: Sequence[Path]) -> int:
    """Of these files together."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def sizes(tree: Tree) -> list[Figure]:
    """Lines of the core and of each room, files, and what surrounds them."""
    rooms: dict[str, list[Path]] = collections.defaultdict(list)
    for path in tree.core.values():
        parts = path.relative_to(tree.root / "src" / PACKAGE).parts
        rooms[parts[0] if len(parts) > 1 else "root"].append(path)
    files = [Offender(lines([path]), tree.place(path, 1)) for path in tree.core.values()]
    comments = sum(
        line.lstrip().startswith("#") for path in tree.core.values() for line in path.read_text("utf-8").splitlines()
    )
    total = lines(list(tree.core.values()))
    return [
        Figure("core_lines", total),
        *(Figure(f"room_{name}", lines(paths)) for name, paths in sorted(rooms.items())),
        Figure("files", len(tree.core)),
        largest("largest_file", files),
        Figure("plugin_lines", lines(list((tree.root / "src" / PLUGINS).rglob("*.py")))),
        Figure("test_lines", lines([*(tree.root / "tests").rglob("*.py")])),
        Figure("benchmark_lines", lines([*(tree.root / "benchmarks").rglob("*.py")])),
        Figure("comment_percent", round(100 * comments / max(total, 1), 2)),
    ]


def largest(name: str, offenders: Sequence[Offender]) -> Figure:
    """The largest of them is the figure."""
    rows = sorted(offenders, key=lambda one: (-one.count, one.name, one.place))
    return Figure(name, rows[0].count if rows else 0, rows)


def words(tree: Tree) -> list[Figure]:
    """Dialect in the core, and the pages."""
    dialect = collections.Counter[str]()
    for path in tree.core.values():
        dialect.update(word.lower() for word in DIALECT.findall(path.read_text(encoding="utf-8")))
    guide = sorted((tree.root / "docs" / "guide").glob("*.md"))
    counted = [Offender(len(path.read_text("utf-8").split()), str(path.relative_to(tree.root))) for path in guide]
    front = tree.root / "README.md"
    return [
        Figure("dialect_words", dialect.total(), [Offender(n, word) for word, n in dialect.most_common()]),
        Figure("guide_words", sum(one.count for one in counted), sorted(counted, key=lambda one: -one.count)),
        Figure("guide_pages", len(counted)),
        Figure("readme_characters", len(front.read_text("utf-8")) if front.is_file() else 0),
    ]


# -- functions and classes ---------------------------------------------------------------------------------------------


def functions(tree: Tree) -> list[Figure]:
    """The longest and the widest function."""
    long, wide = list[Offender](), list[Offender]()
    for path in tree.core.values():
        for node in ast.walk(tree.parsed[path]):
            if isinstance(node, Function):
                place = tree.place(path, node.lineno)
                long.append(Offender(_length(node), node.name, place))
                if "triton.jit" not in map(ast.unparse, node.decorator_list):  # a kernel's arguments are its memory
                    wide.append(Offender(_width(node), node.name, place))
    return [largest("longest_function", long), largest("widest_function", wide)]


def _length(node: Function) -> int:
    first = node.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node)
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


def _width(node: Function) -> int:
    given = node.args
    names = [one.arg for one in [*given.posonlyargs, *given.args]]
    own = 1 if names[:1] in (["self"], ["cls"]) else 0
    return len(names) - own + len(given.kwonlyargs) + (given.vararg is not None) + (given.kwarg is not None)


@dataclass(frozen=True)
class Class:
    """A class as it is written: its place, its bases' names, the members and attributes that it defines."""

    name: str
    path: Path
    line: int
    bases: tuple[str, ...]
    members: frozenset[str]
    attributes: frozenset[str]


def classes(tree: Tree) -> list[Class]:
    """All classes of the source tree."""
    found = []
    for path, module in tree.parsed.items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                bases = tuple(ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases)
                members = frozenset(_members(node))
                found.append(Class(node.name, path, node.lineno, bases, members, members | _set_on_self(node)))
    return found


def _members(node: ast.ClassDef) -> Iterator[str]:
    for part in node.body:
        if isinstance(part, Function):
            yield part.name
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id
        elif isinstance(part, ast.Assign):
            yield from (target.id for target in part.targets if isinstance(target, ast.Name))


def _set_on_self(node: ast.ClassDef) -> frozenset[str]:
    return frozenset(
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    )


def protocols(tree: Tree, known: Sequence[Class]) -> Figure:
    """Protocols of the core that only hide an import: at most one class implements them."""
    by_name = {one.name: one for one in known}

    def members(one: Class) -> frozenset[str]:
        inherited = (members(by_name[base]) for base in one.bases if base in by_name and base != one.name)
        return one.attributes.union(*inherited)

    single = []
    for one in known:
        if "Protocol" not in one.bases or one.path not in tree.core.values():
            continue
        needs = {name for name in one.members if not name.startswith("__")}
        if not needs:
            continue  # a callable's type
        able = [other.name for other in known if "Protocol" not in other.bases and needs <= members(other)]
        if len(able) < 2:
            single.append(Offender(len(able), f"{one.name} ({', '.join(able)})", tree.place(one.path, one.line)))
    return Figure("single_protocols", len(single), single)


def late(tree: Tree, known: Sequence[Class]) -> Figure:
    """Attributes that are set from outside of the folder of every class that has them."""
    owners: dict[str, set[Path]] = collections.defaultdict(set)
    for one in known:
        for name in one.attributes:
            owners[name].add(one.path.parent)
    found = []
    for path in tree.core.values():
        for node in ast.walk(tree.parsed[path]):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "sys")
            if not own and owners.get(node.attr) and path.parent not in owners[node.attr]:
                found.append(Offender(1, ast.unparse(node), tree.place(path, node.lineno)))
    return Figure("late_assignments", len(found), found)


# -- imports -----------------------------------------------------------------------------------------------------------


def in_circles(tree: Tree) -> list[Figure]:
    """Imports that lead back to where they began."""
    files = {**tree.core, **tree.others}
    known = imports(files)

    def rows(graph: Graph, of: Callable[[str], str]) -> list[Offender]:
        return [Offender(1, " -> ".join(way), _why(way, known, of)) for way in circles(graph)]

    alone = rows(between_modules(known), lambda module: module)
    among = rows(between_rooms(known, files, 1), lambda module: room(module, files, 1))
    folders = rows(between_rooms(known, files), lambda module: room(module, files))
    return [
        Figure("circles", len(among) + len(alone), [*among, *alone]),
        Figure("folder_circles", len(folders), folders),
    ]


def _why(way: Sequence[str], known: Sequence[Import], of: Callable[[str], str]) -> str:
    """An import for each step of a circle."""
    steps = []
    for source, target in itertools.pairwise(way):
        ties = [one for one in known if (of(one.source), of(one.target)) == (source, target)]
        one = min(ties, key=lambda one: (one.how != "", one.how, one.source, one.line))
        steps.append(f"{one.source}:{one.line}{f' ({one.how})' if one.how else ''}")
    return "; ".join(steps)


# -- commands and times ------------------------------------------------------------------------------------------------


def options(root: Path) -> Figure:
    """Options of all commands, counted by the command line's own library in a process of its own."""
    if root != ROOT:
        return Figure("options", None)
    code = "import benchmarks.house.options as o; o.show()"
    told = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    rows = [Offender(count, name) for name, count in json.loads(told.stdout).items()]
    return Figure("options", sum(row.count for row in rows), sorted(rows, key=lambda row: -row.count))


def timed(root: Path, target: str) -> Figure:
    """Seconds of a target of the Makefile."""
    began = time.monotonic()
    code = subprocess.call(["make", target], cwd=root, stdout=sys.stderr)
    outcome = Offender(0, "passed" if code == 0 else f"failed with exit code {code}")
    return Figure(f"{target.replace('-', '_')}_seconds", round(time.monotonic() - began, 1), [outcome])


# -- budgets -----------------------------------------------------------------------------------------------------------


def measure(root: Path) -> list[Figure]:
    """All figures but the times of tests."""
    tree = read(root)
    known = classes(tree)
    return [
        *sizes(tree),
        *functions(tree),
        *in_circles(tree),
        protocols(tree, known),
        late(tree, known),
        options(root),
        *words(tree),
    ]


def budgets(path: Path) -> dict[str, tuple[float, float]]:
    """Figure -> its goal, and the most that it may be today."""
    if not path.is_file():
        return {}
    rows = [line.split() for line in path.read_text("utf-8").splitlines() if line.strip() and line[0] != "#"]
    return {name: (float(goal), float(limit)) for name, goal, limit in rows}


def broken(figures: Sequence[Figure], budget: Mapping[str, tuple[float, float]]) -> list[Figure]:
    """Those above their goal and above today's limit."""
    return [one for one in figures if one.now is not None and one.name in budget and one.now > max(budget[one.name])]


def lower(path: Path, figures: Sequence[Figure]) -> None:
    """Write today's figures as the new limits where they are lower."""
    now = {one.name: one.now for one in figures}
    rows = []
    for line in path.read_text("utf-8").splitlines():
        name, *rest = line.split() if line.strip() and line[0] != "#" else [""]
        value = now.get(name)
        limit = float(rest[1]) if rest else 0.0
        rows.append(line if value is None or value >= limit else f"{name} {rest[0]} {max(value, float(rest[0])):g}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def show(figures: Sequence[Figure], budget: Mapping[str, tuple[float, float]]) -> None:
    """The table, and the worst of what is above its goal."""
    print(f"{'figure':22} {'now':>8} {'goal':>8} {'limit':>8}   worst")
    for one in figures:
        goal, limit = (f"{number:g}" for number in budget.get(one.name, (float("nan"), float("nan"))))
        worst = f"{one.offenders[0].name}  {one.offenders[0].place}" if one.offenders else ""
        now = "-" if one.now is None else f"{one.now:.6g}"
        print(f"{one.name:22} {now:>8} {goal:>8} {limit:>8}   {worst[:100]}".rstrip())
    for one in figures:
        if one.now is not None and one.name in budget and one.now > budget[one.name][0] and one.offenders:
            goal = budget[one.name][0]
            each = one.now == one.offenders[0].count
            over = [row for row in one.offenders if row.count > goal] if each else one.offenders
            print(f"\n{one.name}: {one.now:g}, goal {goal:g}")
            for row in over[:40]:
                print(f"  {row.count:6d}  {row.name}  {row.place}".rstrip())


def main() -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository")
    parser.add_argument("--tests", action="store_true", help="run `make test` and `make test-all`, and time them")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a budget is broken")
    parser.add_argument("--lower", action="store_true", help="write lower figures as the new limits")
    parser.add_argument("--quick", action="store_true", help="as without it")
    given = parser.parse_args()
    root = given.root.resolve()
    path = root / "benchmarks" / "house" / "budget.txt"
    figures = measure(root)
    figures += [timed(root, target) for target in (("test", "test-all") if given.tests else ())]
    if given.lower:
        lower(path, figures)
    budget = budgets(path)
    show(figures, budget)
    over = broken(figures, budget)
    for one in over:
        print(f"over its budget: {one.name} is {one.now:g}, at most {max(budget[one.name]):g}")
    print(json.dumps({one.name: one.now for one in figures}))
    return int(given.check and bool(over))


if __name__ == "__main__":
    raise SystemExit(main())
