# SPDX-License-Identifier: Apache-2.0
"""Detects cluster code in a program from its source and that of modules beside it; runs none of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from paceline.doors.zero import framework_doors

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
ON_TORCH = (
    "torchvision",
    "torchaudio",
    "timm",
    "transformers",
    "diffusers",
    "skorch",
    "torch_geometric",
    "monai",
    "ignite",
)
"""Libraries by which a program uses torch without naming it."""
REACHED = ("torch", "transformers")
"""Modules of which attribute accesses are collected, too."""
OWNERS = ("lightning", "pytorch_lightning", "transformers", "trl")
"""Libraries that own the training loop."""
MOST_FILES = 500


def imported(script: Path, root: Path | None = None) -> set[str]:
    """Dotted names that the program and its local modules import, or reach through attributes of `torch`.

    Local modules lie in the folder `root`, by default that of the program.
    """
    folder, found = root or script.resolve().parent, set[str]()
    waiting, seen = [script.resolve()], set[Path]()
    while waiting and len(seen) < MOST_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        names = set(_names(path, folder))
        found |= names
        waiting += [local for name in names for local in _local(folder, name)]
    return found


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
    tops = {name.split(".")[0] for name in names}
    on_torch = "torch" in tops or not tops.isdisjoint(ON_TORCH)
    return on_torch and not (attaches(names) or other_cluster(names) or framework_doors.of_framework(names)[0])
