# SPDX-License-Identifier: Apache-2.0
"""Tools in C and C++ of which each is a process: one by itself, two workers, and one under AddressSanitizer."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from c_helpers import HERE, compiled, environment, run, targets, workers
from paceline_c import build
from paceline_c.where import shared_library

STEPS = 13


@pytest.mark.timeout(300)
def test_two_workers_train_to_the_bits_of_a_python_program(prefix: Path, tmp_path: Path) -> None:
    (code, first), (other_code, other) = workers([compiled(prefix, "worker.c", tmp_path)], 2)
    assert (code, other_code) == (0, 3), "worker 1 leaves with 3, and worker 0 goes on to its end"
    lines, others = first.splitlines(), other.splitlines()
    trained = [line for line in lines if line.startswith("trained")]
    assert trained == [line for line in others if line.startswith("trained")]
    for line, rule in zip(trained, ("bmuf(period=4)", "sync(reproducible=True)"), strict=True):
        assert [float.fromhex(word) for word in line.split()[1:]] == in_numpy(rule)
    seen = [range(*map(int, line.split()[1:])) for line in lines + others if line.startswith("range")]
    assert sorted(k for one in seen for k in one) == list(range(25))
    differ, lost = (line for line in lines if line.startswith("status"))
    assert differ.startswith("status -4:") and "(6,)" in differ and "(5,)" in differ
    assert [line for line in others if line.startswith("status -4:")], others
    assert lost.startswith("status -5:") and "1" in lost


def in_numpy(rule: str) -> list[float]:
    """The numbers of the same program in Python."""

    def program() -> Any:
        held = [np.ones(6), np.zeros(3)]
        with paceline.attach_arrays(held, rule) as run:
            for step in range(STEPS):
                gradients = run.mean([one - targets(run.world.rank, step, one.size) for one in held])
                for one, gradient in zip(held, gradients, strict=True):
                    one -= 0.125 * gradient
                run.step()
        return [*held[0].tolist(), *held[1].tolist()]

    return list(paceline.simulate(program, 2)[0])


@pytest.mark.slow
def test_a_tool_with_a_python_of_its_own(prefix: Path, tmp_path: Path) -> None:
    own = shared_library()
    tool = compiled(prefix, "own_python.c", tmp_path, own, f"-Wl,-rpath,{Path(own).parent}")
    path = os.pathsep.join([environment()["PYTHONPATH"], sysconfig.get_path("purelib")])
    said = run([tool], PYTHONPATH=path)
    assert said.startswith("status -7: Python has been finalised")


@pytest.mark.slow
def test_the_wrapper_throws_and_leaves(prefix: Path, tmp_path: Path) -> None:
    tool = compiled(prefix, "unwound.cc", tmp_path, "-std=c++11", "-Wpedantic")
    refused, seen, thrown, last = run([tool]).splitlines()
    assert refused.startswith("-3 ") and "no_such_rule" in refused
    assert (seen, thrown, last) == ("6 at 3", "of the tool; attached: 0", "0 of 1, rate 0.5")


def test_a_python_that_is_not_there_is_a_sentence(prefix: Path, tmp_path: Path) -> None:
    tool = compiled(prefix, "life.c", tmp_path, "-pthread")
    said = run([tool], 1, PACELINE_PYTHON=str(tmp_path / "python"))
    assert f"{tmp_path / 'python'} cannot be started" in said and "PACELINE_PYTHON=" in said
    said = run([tool], 1, PYTHONHOME=str(tmp_path))  # a Python that ends its process
    assert "cannot be started" in said and "as expected" not in said


def test_a_python_without_the_package_is_a_sentence(prefix: Path, tmp_path: Path) -> None:
    tool, bare = compiled(prefix, "life.c", tmp_path, "-pthread"), tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    said = run([tool], 1, PACELINE_PYTHON=str(bare))
    assert "No module named" in said and "install paceline-c there, or name another Python: PACELINE_PYTHON=" in said


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_child_of_a_fork_may_not_call_and_the_run_goes_on(prefix: Path, tmp_path: Path, locale: str) -> None:
    place = tmp_path / "a model, \u00e9"
    child, parent, *refused = run([compiled(prefix, "forks.c", tmp_path), place], LC_ALL=locale).splitlines()
    assert child.startswith("child: -2 -2 -2: this process was forked from the one that attached")
    assert parent == "child ended with 0 after 30 steps"
    assert (place / "manifest.json").is_file() == (locale != "C") == (not refused)
    assert all("set LC_ALL=C.UTF-8" in line for line in refused)


@pytest.mark.slow
def test_an_error_that_nobody_catches_is_a_sentence_and_no_abort(prefix: Path, tmp_path: Path) -> None:
    tool = compiled(prefix, "uncaught.cc", tmp_path, "-std=c++11", "-Wpedantic")
    refused = run([tool, "bmfu", "none"], 1)
    assert refused.startswith("paceline: ") and "bmfu" in refused
    assert run([tool, "bmuf", "none"], 1).startswith("paceline: ")
    assert "of the tool" in run([tool, "bmuf", "own"], -signal.SIGABRT)  # what C++ does with it


@pytest.fixture(scope="module")
def sanitized(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Compiles a tool together with the library under AddressSanitizer and UndefinedBehaviorSanitizer."""
    folder = tmp_path_factory.mktemp("sanitized")
    flags = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-pthread"]

    def make(source: str) -> Path:
        tool = folder / Path(source).stem
        sources = [str(build.HERE / "paceline.c"), str(HERE / source)]
        command = ["cc", *flags, f'-DPL_BUILT_FOR="{sys.executable}"', f"-I{prefix}/include", *sources, "-o", str(tool)]
        done = subprocess.run([*command, "-ldl"], capture_output=True, text=True)
        if done.returncode and "cannot find" in done.stderr:
            pytest.skip("the compiler has no AddressSanitizer")
        assert done.returncode == 0, done.stderr
        return tool

    return make


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tool_by_itself_with_threads_ends_without_a_call(sanitized: Callable[[str], Path], tmp_path: Path) -> None:
    """Leaks are looked for below: torch keeps so much to the end that the search takes minutes."""
    log = tmp_path / "log"
    said = run([sanitized("life.c")], PACELINE_LOG=str(log), ASAN_OPTIONS="detect_leaks=0")
    assert said.endswith("as expected\n")
    text = next(log.glob("rank-*.jsonl")).read_text(encoding="utf-8")
    assert '"kind": "close"' in text and text.count('"loss"') == 100


BRIDGE = """
count = 0

def answer(*given):
    global count
    count += 1
    return (1, "", 3, 4, 0.5) if count % 2 else (-8, f"sentence {count}", 0, 0, 0.0)

def __getattr__(name):
    if name == "mean":
        raise AttributeError("there is no mean")
    return (lambda *given: 1 / 0) if name == "save" else answer
"""


def test_calls_leak_nothing(sanitized: Callable[[str], Path], tmp_path: Path) -> None:
    """The library with a Python half that keeps nothing: many calls leave as much behind as a few."""
    package = tmp_path / "paceline_c"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "bridge.py").write_text(BRIDGE)
    shutil.copyfile(build.HERE / "where.py", package / "where.py")
    options = {"PYTHONMALLOC": "malloc", "ASAN_OPTIONS": "symbolize=0", "LSAN_OPTIONS": "exitcode=0"}
    tool, left = sanitized("calls.c"), []
    for rounds in (3, 1000):
        said = run([tool, str(rounds)], PYTHONPATH=str(tmp_path), **options)
        assert f"{rounds} wrong" in said or f"{rounds - 1} wrong" in said
        left += re.findall(r"leaked in (\d+) allocation", said) or ["0"]
    few, many = map(int, left)
    assert many <= few + 100
