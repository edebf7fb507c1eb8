# SPDX-License-Identifier: Apache-2.0
"""Every package that is imported can be installed with paceline, by the extra that messages and documents name."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.core.lazy import MissingExtraError

ROOT = Path(paceline.__file__).parent.parent
REPOSITORY = ROOT.parent
SOURCES = [path for name in ("paceline", "paceline_plugins") for path in (ROOT / name).rglob("*.py")]
PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")

CORE = {"torch", "numpy", "safetensors", "typer", "rich", "cryptography", "click", "cloudpickle", "tomli"}
OF_OTHERS = {"fsspec": "torch", "triton": "torch", "typing_extensions": "torch"}
"""What a package of the core brings along; torch brings Triton in its CUDA builds."""
EXTRAS = {
    "accelerate": "accelerate",
    "google_crc32c": "remote",
    "jax": "jax",
    "keras": "keras",
    "lightning": "lightning",
    "matplotlib": "report",
    "mpi4py": "mpi",
    "obstore": "remote",
    "prometheus_client": "metrics",
    "pyarrow": "parquet",
    "sklearn": "sklearn",
    "tensorflow": "tensorflow",
    "transformers": "transformers",
}
"""Module -> extra."""
DISTRIBUTIONS = {"google_crc32c": "google-crc32c", "prometheus_client": "prometheus-client", "sklearn": "scikit-learn"}
DOORS = {
    "paceline.doors.adapters.accelerate": ("accelerate", "accelerate"),
    "paceline.doors.adapters.fabric": ("lightning", "lightning"),
    "paceline.doors.adapters.hugging_face": ("transformers", "transformers"),
    "paceline.doors.adapters.lightning": ("lightning", "lightning"),
    "paceline_plugins.frameworks.jax": ("jax", "jax"),
    "paceline_plugins.frameworks.keras": ("keras", "keras"),
    "paceline_plugins.frameworks.sklearn": ("sklearn", "sklearn"),
    "paceline_plugins.frameworks.tensorflow": ("tensorflow", "tensorflow"),
}
"""Adapter -> the package that it is for, and its extra."""


def section(name: str) -> str:
    """The lines of a table of pyproject.toml; tomllib came with Python 3.11."""
    return PYPROJECT.partition(f"\n[{name}]\n")[2].partition("\n[")[0]


def extras() -> dict[str, set[str]]:
    """Extra -> names of distributions, those of the extras that it includes among them."""
    told = re.findall(r"^([\w-]+) = \[(.*?)\]$", section("project.optional-dependencies"), re.MULTILINE | re.DOTALL)
    found: dict[str, set[str]] = {}
    for extra, body in told:
        found[extra] = set()
        for wish in re.findall(r'"([^"]+)"', body):
            name, inner = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", wish).groups()  # type: ignore[union-attr]
            found[extra] |= set().union(*(found[one] for one in inner.split(","))) if name == "paceline" else {name}
    return found


def imported() -> Iterator[tuple[Path, str]]:
    """Modules of others that the package names in an import, wherever that stands."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in ("paceline", "paceline_plugins"):
                    yield path, top


def test_everything_that_is_imported_can_be_installed() -> None:
    named = list(imported())
    unknown = {(str(path), name) for path, name in named if name not in CORE | set(OF_OTHERS) | set(EXTRAS)}
    assert not unknown, "name the package in pyproject.toml, and here"
    assert {name for _, name in named} >= set(EXTRAS), "no longer imported"


def test_the_core_is_what_pyproject_says() -> None:
    named = set(re.findall(r'"([\w-]+)>=', section("project").partition("dependencies = [")[2]))
    assert named == CORE - {"click"}  # which typer is made of


@pytest.mark.parametrize(("module", "extra"), EXTRAS.items())
def test_an_extra_brings_its_package(module: str, extra: str) -> None:
    assert DISTRIBUTIONS.get(module, module) in extras()[extra]


def test_texts_name_extras_that_exist() -> None:
    texts = [*SOURCES, *REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    named = {
        (path.name, extra)
        for path in texts
        for found in re.findall(r"paceline\[([a-z][a-z,_-]*)\]", path.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert named
    assert not {(path, extra) for path, extra in named if extra not in extras()}


@pytest.mark.parametrize(("door", "package", "extra"), [(door, *rest) for door, rest in DOORS.items()])
def test_a_door_says_what_to_install(door: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("paceline.doors.adapters", "paceline_plugins.frameworks"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    for name in {package, *(name for name in sys.modules if name.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=re.escape(f"pip install 'paceline[{extra}]'")):
        importlib.import_module(door)
