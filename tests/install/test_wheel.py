# SPDX-License-Identifier: Apache-2.0
"""The wheel, installed into an environment of its own and used from a folder that knows no checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import paceline

REPOSITORY = Path(__file__).parents[2]

pytest.importorskip("hatchling", reason="hatchling is not installed, which builds the wheel")

PROGRAM = Path(__file__).with_name("program.py").read_text(encoding="utf-8")


def run(command: list[str], folder: Path) -> str:
    """What it says; nothing of the checkout is in its environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(kind: str, source: Path, folder: Path) -> Path:
    """A distribution, made by the build backend itself, so that nothing is fetched."""
    run([sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(folder)], source)
    (found,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(real_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", REPOSITORY, tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.processes
def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    inside = contents(wheel)
    package = {name for name in inside if name.startswith(("paceline/", "paceline_plugins/"))}
    files = (path for path in (REPOSITORY / "src").rglob("*") if path.is_file())
    expected = {str(path.relative_to(REPOSITORY / "src")) for path in files if "__pycache__" not in path.parts}
    assert package == expected
    assert "paceline/py.typed" in package
    others = {name.rpartition("/")[2] for name in set(inside) - package}
    assert others == {"METADATA", "WHEEL", "RECORD", "LICENSE", "NOTICE", "uPlot.LICENSE", "entry_points.txt"}
    version = re.search(rb"uPlot \(v([\d.]+)\)", inside["paceline_plugins/report/assets/uPlot.min.js"])
    (notice,) = (text for name, text in inside.items() if name.endswith("/NOTICE"))
    assert version is not None and b"uPlot " + version[1] in notice, "NOTICE names another version"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("lightrnn", "lightrnn = paceline_lightrnn.commands.command:app"),
        ("dual", "dual = paceline_dual.commands.command:app"),
        ("c", "config = paceline_c.command:app"),
    ],
)
def test_a_package_is_a_wheel_of_its_own(name: str, command: str, tmp_path: Path) -> None:
    source = REPOSITORY / "packages" / name
    inside = contents(build("wheel", source, tmp_path / "wheel"))
    files = (path for path in (source / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    expected = {str(path.relative_to(source / "src")) for path in files}
    assert {path for path in inside if not path.partition("/")[0].endswith(".dist-info")} == expected
    assert f"paceline_{name}/py.typed" in expected
    (points,) = (text.decode() for path, text in inside.items() if path.endswith("entry_points.txt"))
    assert points.split() == ["[paceline.commands]", *command.split()]
    (licence,) = (text for path, text in inside.items() if path.endswith("LICENSE"))
    assert licence == (REPOSITORY / "LICENSE").read_bytes()
    again = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(again) as archive:
        parts = {path.split("/")[1] for path in archive.getnames()}
    assert {"src", "tests", "docs", "README.md", "LICENSE", "pyproject.toml"} <= parts


@pytest.mark.slow
@pytest.mark.processes
def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", REPOSITORY, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(tmp_path / "source", filter="data")
        else:
            archive.extractall(tmp_path / "source")
    (source,) = (tmp_path / "source").iterdir()
    assert {"tests", "docs", "examples", "Makefile", "constraints.txt"} <= {path.name for path in source.iterdir()}
    assert contents(build("wheel", source, tmp_path / "again")) == contents(wheel)


@pytest.mark.slow  # a fresh environment, and torch is imported by five processes
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_the_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    environment, folder = tmp_path / "environment", tmp_path / "elsewhere"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], tmp_path)
    base = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", vars=base))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # what paceline needs comes from the environment of the tests, but for a paceline that may be installed there
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python, command = str(environment / "bin" / "python"), [str(environment / "bin" / "python"), "-m", "paceline"]
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")

    assert str(site) in run([python, "train.py"], folder)
    assert run([*command, "--version"], folder).strip() == f"paceline {paceline.__version__}"
    said = run([*command, "run", "--workers", "2", "--log", "log", "train.py"], folder)
    assert str(site) in said
    assert len(list((folder / "log").glob("rank-*.jsonl"))) == 2
    run([*command, "report", "log", "--output", "page"], folder)
    assert (folder / "page" / "index.html").is_file()
