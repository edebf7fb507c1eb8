# SPDX-License-Identifier: Apache-2.0
"""`paceline config`, and how the library is built."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from c_helpers import HERE
from paceline_c import build
from paceline_c.build import BuildError, Place
from paceline_c.command import app


def test_the_flags_are_those_of_pkg_config(prefix: Path) -> None:
    found = CliRunner().invoke(app, ["--prefix", str(prefix), "--cflags", "--libs"])
    assert found.exit_code == 0 and "which" not in found.output
    assert shlex.split(found.output) == [
        f"-I{prefix}/include",
        f"-L{prefix}/lib",
        "-lpaceline",
        f"-Wl,-rpath,{prefix}/lib",
    ]
    if shutil.which("pkg-config") is None:
        pytest.skip("there is no pkg-config")
    command = ["pkg-config", "--cflags", "--libs", "paceline"]
    path = {"PKG_CONFIG_PATH": f"{prefix}/lib/pkgconfig", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    said = subprocess.run(command, env=path, capture_output=True, text=True)
    assert sorted(shlex.split(said.stdout)) == sorted(shlex.split(found.output)), said.stderr


def test_the_library_is_built_once_and_again_for_other_sources(tmp_path: Path) -> None:
    place = Place(tmp_path / "new")
    first = CliRunner().invoke(app, ["--prefix", str(place.prefix)])
    assert first.exit_code == 0 and "which" in first.output
    made = place.library.stat().st_mtime_ns
    assert place.fresh() and "which" not in CliRunner().invoke(app, ["--prefix", str(place.prefix)]).output
    assert place.library.stat().st_mtime_ns == made
    place.package.write_text(place.package.read_text().replace("# sources", "# other sources"))
    assert not place.fresh()
    assert CliRunner().invoke(app, ["--prefix", str(place.prefix), "--build"]).exit_code == 0 and place.fresh()
    assert sorted(path.name for path in place.lib.iterdir()) == ["libpaceline.so", "pkgconfig"]


def test_what_cannot_be_built_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BuildError, match="--prefix DIR"):
        build.build(Place(blocked))
    monkeypatch.setenv("CC", "no-such-compiler")
    refused = CliRunner().invoke(app, ["--prefix", str(tmp_path / "new"), "--libs"])
    assert refused.exit_code == 2 and "no-such-compiler" in refused.output
    monkeypatch.setenv("CC", "cc -DPL_BUILT_FOR=1")
    with pytest.raises(BuildError, match="failed"):
        build.build(Place(tmp_path / "new"), ("-Werror", "--no-such-flag"))
    monkeypatch.setattr(build, "shared_library", lambda: "")
    with pytest.raises(BuildError, match="has no shared library"):
        build.build(Place(tmp_path / "new"))


@pytest.mark.parametrize("standard", ["c99", "c17"])
def test_the_header_is_plain_c(prefix: Path, tmp_path: Path, standard: str) -> None:
    command = ["cc", f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    done = subprocess.run([*command, "-x", "c", f"{prefix}/include/paceline.h"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_function_of_the_header_is_in_the_library_and_on_the_page(prefix: Path) -> None:
    header = (build.HERE / "paceline.h").read_text(encoding="utf-8")
    functions = set(re.findall(r"^PL_API .*?\b(pl_\w+)\(", header, re.MULTILINE))
    listed = subprocess.run(["nm", "-D", "--defined-only", str(Place(prefix).library)], capture_output=True, text=True)
    assert functions == set(re.findall(r" T (\w+)", listed.stdout)) and len(functions) == 22
    page = (HERE.parent / "docs" / "c.md").read_text(encoding="utf-8")
    assert functions <= set(re.findall(r"pl_\w+", page))
