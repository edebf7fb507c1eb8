# SPDX-License-Identifier: Apache-2.0
"""The core passes its tests in an environment that has no plugin.

`tests/conftest.py` leaves out the modules that import a plugin and the tests marked `plugins` where none is installed.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[2]
SOME = ("tests/core", "tests/rules/outer", "tests/run/test_run.py", "tests/update/server/test_shard.py")
"""A part of each service, in half a minute."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, real_processes: None) -> Path:
    """The interpreter of an environment that has this one's packages, and of paceline the core alone."""
    here = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", here / "venv"], check=True, timeout=60)
    (here / "src").mkdir()
    (here / "src" / "paceline").symlink_to(Path(paceline.__file__).parent)
    packages = here / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    described = packages / f"paceline-{paceline.__version__}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(distribution("paceline").read_text("METADATA") or "")
    (described / "entry_points.txt").write_text("[console_scripts]\npaceline = paceline.__main__:main\n")
    others = Path(pytest.__file__).parents[1]
    (packages / "first.pth").write_text(f"{here / 'src'}\n{ROOT}\n{others}\n")
    return here / "venv" / "bin" / "python"


def test_nothing_of_a_plugin_is_there(python: Path) -> None:
    code = (
        "import paceline, importlib.util as u, importlib.metadata as m; print(u.find_spec('paceline_plugins'), "
        "len(m.entry_points(group='paceline.launchers')), paceline.__file__)"
    )
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.split()[:2] == ["None", "0"]
    assert str(python.parents[2]) in shown


@pytest.mark.parametrize("which", [SOME, pytest.param(("tests",), marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_the_core_passes_its_tests(python: Path, which: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full and not slow", *which],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=3500,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-5000:]
    assert " passed" in ended.stdout
