# SPDX-License-Identifier: Apache-2.0
"""The core of the suite, against the built wheel, on the Pythons and torch versions that are served.

::

    make matrix                                      all of them, one after another; several gigabytes of torch
    nox --session "core(python='3.12', torch='2.6.0')"
    nox --session core-3.13 -- tests/run/test_run.py
    nox --session tensorflow                         the doors that need TensorFlow, which `make test-all` skips

A Python that is not installed, and a pair that does not install, are skipped by name.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
NEWEST = "2.15.0"
OLDEST = "2.6.0"
CORE = (
    "tests/install/test_imports.py",
    "tests/cli/test_commands.py",
    "tests/rules/codec",
    "tests/rules/outer",
    "tests/processes/test_gloo.py",
    "tests/rules/schedule",
    "tests/communication/schedulers",
    "tests/update/engine/test_blocks.py",
    "tests/rules/test_laws.py",
    "tests/update/engine/test_overlap.py",
    "tests/run/test_run.py",
    "tests/rules/topology",
    "tests/communication",
    "tests/doors/zero",
)
WITH_TENSORFLOW = (
    "tests/doors/adapters/test_tensorflow.py",
    "tests/doors/adapters/test_arrays.py",
    "tests/doors/adapters/test_keras.py",
    "tests/doors/adapters/test_array_examples.py",
)
TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "hypothesis>=6.100")

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["core"]
nox.options.reuse_venv = "yes"


def oldest() -> list[str]:
    """The least versions of what the package needs."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needs = text.partition("\ndependencies = [")[2].partition("]")[0]
    return [f"{name}=={version}" for name, version in re.findall(r'"([\w-]+)>=([\d.]+)"', needs)]


def wheel(session: nox.Session) -> str:
    """Build it; the path."""
    folder = Path(session.create_tmp()) / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    session.run("uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT), external=True)
    return str(next(folder.glob("*.whl")))


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
@nox.parametrize("torch", [OLDEST, NEWEST])
def core(session: nox.Session, torch: str) -> None:
    """The wheel in an environment of its own, and the core of the suite beside it. The first pair has the least
    versions of everything else, too."""
    least = oldest() if (session.python, torch) == ("3.10", OLDEST) else [f"torch=={torch}"]
    built = wheel(session)
    try:
        session.install(built, *least, *TOOLS)
    except CommandFailed:
        session.skip(f"torch {torch} does not install on Python {session.python}")
    # beside a copy of the tests, so that what runs is the wheel and not src/
    place = Path(session.create_tmp()) / "checkout"
    shutil.rmtree(place, ignore_errors=True)
    for name in ("tests", "examples", "docs"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy2(ROOT / name, place / name)
    session.chdir(place)
    session.run(
        "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not network",
        *(session.posargs or CORE),
    )  # fmt: skip
    program = str(place / "tests" / "install" / "program.py")
    session.run("paceline", "run", "--workers", "2", "--overwrite", "--log", str(place / "log"), program)


@nox.session(python="3.11")
def tensorflow(session: nox.Session) -> None:
    """Arrays, and Keras on all its back ends, with TensorFlow installed; 2 gigabytes."""
    session.install("--constraint", str(ROOT / "constraints.txt"), f"{ROOT}[jax,keras,sklearn,tensorflow,test]")
    session.chdir(ROOT)
    chosen = session.posargs or WITH_TENSORFLOW
    session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *chosen)
