# SPDX-License-Identifier: Apache-2.0
"""`paceline data`: what a user types, also what makes no sense."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from tests.data.packed.made import back, by_key, folder, index_of, packed
from tests.paths import python_path


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def refused(result: Result, says: str) -> None:
    """Exit code 2, one message, no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_pack_verify_and_read(tmp_path: Path) -> None:
    made = folder(tmp_path / "in", 30)
    result = call("pack", tmp_path / "in", tmp_path / "out", "--seed", 1)
    assert result.exit_code == 0, result.output
    shards = len(index_of(tmp_path / "out").shards)
    assert f"out: 30 samples in {shards} shard" in result.stdout
    assert "30 of jpg + source.json + txt" in result.stdout
    assert by_key(back(tmp_path / "out")) == made
    result = call("verify", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"30 samples in {shards} shard" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{}/nothing", "{}/out"], "nothing does not exist"),
        (["{}/in", "{}/in"], "in exists already"),
        (["{}/in", "{}/out", "--seed", "-1"], "--seed must be at least 0, got -1"),
        (["{}/a.tar", "{}/out", "--seed", "1"], "pack it without --seed, then pack what came out"),
        (["{}/a.tar", "{}/out"], "a.tar at byte 0: cut off within a header"),
        (["{}/in", "{}/file/out"], "choose another place"),
        (["{}/in", "{}/in/cat/out"], "would be packed into itself"),
        (["{}/empty", "{}/out"], "no samples"),
    ],
)
def test_pack_refuses(tmp_path: Path, arguments: list[str], says: str) -> None:
    folder(tmp_path / "in", 4)
    (tmp_path / "a.tar").touch()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    refused(call("pack", *(text.format(tmp_path) for text in arguments)), says)
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "empty", "file", "in"]


def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    place = packed(tmp_path)
    first, second = index_of(place).shards[:2]
    raw = bytearray((place / first.name).read_bytes())
    raw[600] ^= 1
    (place / first.name).write_bytes(raw)
    os.truncate(place / second.name, 100)
    result = call("verify", place)
    assert result.exit_code == 1
    assert f"DAMAGED {first.name}: {first.name} has sha256" in result.stdout
    assert f"DAMAGED {second.name}: {second.name} has 100 bytes" in result.stdout
    assert f"damaged: 2 of {len(index_of(place).shards)} shards" in result.stdout


def test_plan_says_need_and_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline_plugins.data.command.SECONDS", 0.1)
    place = packed(tmp_path)
    asked = ["plan", place, "--workers", 2]
    good = call(*asked, "--samples-per-second", 0.001)
    assert good.exit_code == 0, good.output
    assert "yes: 2 workers would be fed" in good.stdout
    assert "decoding and augmentation were not measured" in good.stdout
    bad = call(*asked, "--samples-per-second", 1e12, "--hosts", 2)
    assert bad.exit_code == 1, bad.output
    assert "no: 2 workers would wait about 100 % of the time" in bad.stdout
    assert "measured from one host" in bad.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workers", "0", "--samples-per-second", "1"], "--workers must be at least 1"),
        (["--workers", "2", "--hosts", "3", "--samples-per-second", "1"], "--hosts lie in 1..workers, got 2 and 3"),
        (["--workers", "2", "--samples-per-second", "0"], "--samples-per-second must be above 0, got 0"),
        (["--workers", "2", "--samples-per-second", "nan"], "--samples-per-second must be above 0, got nan"),
        (["--workers", "2", "--samples-per-second", "1", "--link", "fast"], "--link must be a rate"),
        (["--workers", "2", "--samples-per-second", "1", "--cache", "-1"], "--cache must be a size"),
        (["--workers", "2", "--samples-per-second", "1"], "has no files with data"),
    ],
)
def test_plan_refuses(tmp_path: Path, arguments: list[str], says: str) -> None:
    refused(call("plan", tmp_path, *arguments), says)


def _hears_interrupts() -> None:
    """Programs that a shell runs in the background ignore SIGINT, and so do their children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_pack_that_is_ended_leaves_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"1\n" * 3_000_000)  # takes a minute and more
    environment = os.environ | {"PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "paceline", "data", "pack", tmp_path / "a.jsonl", tmp_path / "out"]
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hears_interrupts,
    )
    try:
        until = time.monotonic() + 90
        while not (tmp_path / "out.partial" / "shard-00000.tar").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until, "packing never began"
            time.sleep(0.01)
        process.send_signal(getattr(signal, name))
        said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode not in (0, None)
    assert "Traceback" not in "".join(said)
    if name == "SIGKILL":  # nothing that is in the way of the next one
        (tmp_path / "a.jsonl").write_bytes(b"1\n" * 10)
        assert call("pack", tmp_path / "a.jsonl", tmp_path / "out").exit_code == 0
        shutil.rmtree(tmp_path / "out")
    assert os.listdir(tmp_path) == ["a.jsonl"]
