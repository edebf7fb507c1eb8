# SPDX-License-Identifier: Apache-2.0
"""`python -m devtools.storm`: what is refused and why, and a failure that is repeated by the command that it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from devtools.storm.__main__ import app
from devtools.storm.mutants import MUTANTS
from typer.testing import CliRunner, Result

from tests.testing.test_tape import steady, written


def storm(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def said(result: Result) -> str:
    """What was printed, without line breaks and frames."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", result.output)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--seeds", 0), "--seeds must be at least 1, got 0"),
        (("--seeds", "many"), "Invalid value for '--seeds'"),
        (("--first", -1), "--first must be at least 0, got -1"),
        (("--jobs", 0), "--jobs must be at least 1, got 0"),
        (("--minutes", 0), "--minutes must be above 0, got 0"),
        (("--minutes", "nan"), "--minutes must be above 0, got nan"),
        (("--minutes", "inf"), "--minutes must be above 0, got inf"),
        (("--over", "everything"), "--over is one of control, run, leaving, server, steps, got 'everything'"),
        (("--over", "tape"), "--over is one of control, run, leaving, server, steps, got 'tape'"),
        (("--rule", "bmuf"), "--rule is of whole runs: give it with --over run"),
        (("--over", "run", "--rule", "bmfu"), "there is no rule 'bmfu'"),
        (("--over", "run", "--rule", "bmuf(period=0)"), "period"),
        (("--over", "run", "--rule", "sync"), "an elastic run needs a block rule"),
        (("--over", "server", "--rule", "bmuf"), "is over asynchronous rules"),
        (("--faults", "earthquake"), "there is no fault 'earthquake'"),
        (("--faults", ","), "--faults are names with commas between, got ','"),
        (("--workers", "4:2"), "--workers is MIN:MAX with 1 <= MIN <= MAX <= 64, got '4:2'"),
        (("--workers", "4"), "--workers is MIN:MAX"),
        (("--workers", "0:2"), "--workers is MIN:MAX"),
        (("--workers", "1:65"), "--workers is MIN:MAX"),
        (("--page", "x.html"), "--page shows one seed: give it with --replay SEED"),
        (("--replay", -1), "--replay is a seed, from 0 on, got -1"),
        (("--replay", 3, "--page", "nowhere/at/all.html"), "nowhere/at/all.html"),
        (("--leave-out", "1"), "--leave-out makes one seed smaller: give it with --replay SEED"),
        (("--replay", 3, "--leave-out", "1,x"), "--leave-out is numbers of faults with commas between, got '1,x'"),
        (("--fewer", 1), "--fewer makes one seed smaller"),
        (("--replay", 3, "--fewer", -1), "--fewer is a number of workers, from 0 on, got -1"),
        (("--mbit", 50), "--mbit is asked of a recorded run: give it with --replay-tape RUN"),
        (("--without-death", 7), "--without-death is asked of a recorded run"),
        (("--replay-tape", "nowhere"), "nowhere is no file: name the log directory of an elastic run"),
        (("--replay-tape", "nowhere", "--over", "run"), "--over is of drawn runs, and --replay-tape plays a recorded"),
        (("--replay-tape", "nowhere", "--faults", "reset"), "--faults is of drawn runs"),
        (("--replay-tape", "nowhere", "--mbit", 0), "--mbit must be above 0, got 0"),
    ],
)
def test_what_is_refused(
    arguments: tuple[object, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = storm(*arguments)
    assert result.exit_code == 2 and why in said(result), result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--without-death", 0), "worker 0 was not lost in this run; lost were none"),
        (("--rule", "sync"), "an elastic run needs a block rule"),
        (("--rule", "bmfu"), "there is no rule 'bmfu'"),
    ],
)
def test_what_is_refused_of_a_tape(arguments: tuple[object, ...], why: str, tmp_path: Path) -> None:
    result = storm("--replay-tape", written(tmp_path, steady()), *arguments)
    assert result.exit_code == 2 and why in said(result), result.output


@pytest.mark.slow  # tests/testing has the search by itself
@pytest.mark.full
def test_a_failure_gets_smaller_and_is_repeated_by_the_command_that_it_prints(tmp_path: Path) -> None:
    with MUTANTS["leases of lost workers are not freed"]():
        first = storm("--replay", 1)
        assert first.exit_code == 1, first.output
        left_out = re.search(r"left out: (\d+) of (\d+) faults, and (\d+) of the first (\d+) workers", first.stdout)
        assert left_out is not None, first.stdout
        fewer_faults, _, fewer_workers, _ = (int(number) for number in left_out.groups())
        assert fewer_faults > 0 and fewer_workers > 0
        command = next(line for line in first.stdout.splitlines() if line.startswith("  python -m devtools.storm "))
        page = tmp_path / "page.html"
        again = storm(*shlex.split(command)[3:], "--page", page)
        assert again.exit_code == 1 and again.stderr == first.stderr
    assert "Seed 1: failed" in page.read_text() and " fault: " in page.read_text()
    mended = storm(*shlex.split(command)[3:])
    assert mended.exit_code == 0 and mended.stderr == "", mended.output
