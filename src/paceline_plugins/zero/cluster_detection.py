# SPDX-License-Identifier: Apache-2.0
"""Detects torch and cluster code in a program, from its source and that of its own modules; runs none of it.

Its own modules lie beside it, or in a package that was installed from a folder (`pip install -e .`). Of other packages
only what they require is read.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from paceline_plugins.zero import framework_doors

OTHERS = (
    "accelerate",
    "deepspeed",
    "horovod",
    "lightning",
    "pytorch_lightning",
    "ray",
    "torchft",
    "hivemind",
    "mpi4py",
)
"""Libraries that set up a cluster themselves."""
REACHED = ("torch", "transformers")
"""Modules of which attribute accesses are collected, too."""
OWNERS = ("lightning", "pytorch_lightning", "transformers", "trl")
"""Libraries that own the training loop."""
MOST_FILES = 500


def imported(script: Path, root: Path | None = None) -> set[str]:
    """Dotted names that the program and its own modules import, or reach through attributes of `torch`.

    Also torch and paceline, where an installed package requires them that is imported. Modules beside the program lie
    in the folder `root`, by default that of the program.
    """
    folder, found = root or script.resolve().parent, set[str]()
    waiting, seen = [(script.resolve(), folder)], set[Path]()
    while waiting and len(seen) < MOST_FILES:
        path, below = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        names = set(_names(path, below))
        found |= names
        for name in names:
            local = [(one, folder) for one in _local(folder, name)]
            place = None if local else _own_package(name.split(".")[0])
            waiting += local if place is None else [(one, place) for one in _local(place, name)]
    tops = {name.split(".")[0] for name in found}
    others = set() if framework_doors.on_torch(found) else {top for top in tops if not any(_local(folder, top))}
    return found | _required({*filter(None, map(_distribution, others))})


def _names(path: Path, folder: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # Python reports the error when it runs the file
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = ".".join([*_package(path, node.level, folder), *([node.module] if node.module else [])])
            yield from [source] if source else []
            yield from (f"{source}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in REACHED:
            yield f"{node.value.id}.{node.attr}"


def _package(path: Path, level: int, folder: Path) -> tuple[str, ...]:
    """The package that the dots of a relative import mean, below `folder`."""
    inside = path.parents[level - 1] if 0 < level <= len(path.parents) else folder
    return inside.relative_to(folder).parts if inside.is_relative_to(folder) else ()


def _local(folder: Path, name: str) -> Iterator[Path]:
    """Files beside the program that the module name may refer to."""
    place = folder.joinpath(*name.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            yield path


@functools.cache
def _place(top: str) -> Path | None:
    """The folder from which a top-level module is imported that is no part of Python."""
    try:
        spec = None if top in sys.stdlib_module_names else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    folders = [] if spec is None else [*(spec.submodule_search_locations or ()), *filter(None, [spec.origin])]
    return Path(folders[0]).parent if folders else None


def _distribution(top: str) -> metadata.Distribution | None:
    """The installed distribution that has the module; by its name if there is one of the same name."""
    place = _place(top)
    folders = sorted(place.glob("*.dist-info")) if place is not None else []
    named = (one for one in folders if re.sub(r"[-.]", "_", one.name.split("-")[0]).lower() == top.lower())
    found = next(named, None) or next((one for one in folders if _has(one, top)), None)
    return None if found is None else metadata.Distribution.at(found)


def _has(folder: Path, top: str) -> bool:
    """Whether the distribution with this `.dist-info` folder has the module."""
    record = folder / "RECORD"
    text = record.read_text(encoding="utf-8", errors="replace") if record.is_file() else ""
    return re.search(rf"^{top}(/|\.py,)", text, re.MULTILINE) is not None


@functools.cache
def _own_package(top: str) -> Path | None:
    """The folder of a package that is the program's own: it comes from no package index."""
    place = _place(top)
    if place is None or top in ("paceline", "torch") or top.startswith("paceline_"):
        return None
    if next(place.glob("*.dist-info"), None) is None:
        return place
    return place if any(_has(one.parent, top) for one in place.glob("*.dist-info/direct_url.json")) else None


def _required(waiting: set[metadata.Distribution]) -> set[str]:
    """Which of torch and paceline distributions require, themselves or by others."""
    found, seen = set[str](), set[str]()
    while waiting:
        for text in waiting.pop().requires or ():
            name = re.split(r"[^\w.-]", text)[0].lower()
            if name in seen or "extra ==" in text:
                continue
            seen.add(name)
            found |= {name} & {"torch", "paceline"}
            try:
                waiting.add(metadata.distribution(name))
            except metadata.PackageNotFoundError:
                continue
    return found


def attaches(names: set[str]) -> bool:
    """Whether the program uses paceline, or a package named paceline_*, which attaches for it."""
    tops = {name.split(".")[0] for name in names}
    return any(top == "paceline" or top.startswith("paceline_") for top in tops)


def other_cluster(names: set[str]) -> str:
    """The library by which the program sets up a cluster; empty if there is none.

    A framework that owns the training loop takes precedence over its dependencies (accelerate).
    """
    found = [name for name in sorted(names) if _makes_cluster(name)]
    return next((name for name in found if name.split(".")[0] in OWNERS), found[0] if found else "")


def _makes_cluster(name: str) -> bool:
    first = name.split(".")[0]
    if first in OTHERS or name.startswith("torch.distributed") or "DistributedDataParallel" in name:
        return True
    return first == "trl" or (first == "transformers" and name.endswith("Trainer")) or "transformers.trainer" in name


def unaware(script: Path, root: Path | None = None) -> bool:
    """Whether it is a torch program for one device that imports neither paceline nor a cluster library."""
    return bare(imported(script, root))


def bare(names: set[str]) -> bool:
    """As `unaware`, from the names that the program imports."""
    return framework_doors.on_torch(names) and not (
        attaches(names) or other_cluster(names) or framework_doors.of_framework(names)[0]
    )
