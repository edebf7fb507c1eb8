# SPDX-License-Identifier: Apache-2.0
"""One run at a time has a checkpoint place, and a place that cannot be written is found before the training."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import claim
from paceline.checkpoint.claim import DirectoryClaim
from paceline.core.world import host_name
from paceline.errors import CheckpointError
from paceline_plugins.data import checkpoint_store
from paceline_plugins.data.checkpoint_store import Lease
from tests.checkpoint.test_exact import kept, steps
from tests.helpers import Program, adam, simulate, train

RULE = "bmuf(period=3)"
CHOICES: dict[str, Any] = {"optimizer": adam, "samples": 48}
HOLDER = """
import sys
from itertools import count
from pathlib import Path
from paceline.checkpoint.claim import DirectoryClaim
for line in sys.stdin:
    DirectoryClaim(Path(line.strip()), "other").take()
    print("has it", flush=True)
"""


class Holder:
    """Another process, which claims directories for another run."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self, directory: Path) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{directory}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "has it\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def holder(real_processes: None) -> Iterator[Holder]:
    one = Holder()
    yield one
    one.kill()


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "WAIT_S", 0.2)
    monkeypatch.setattr(checkpoint_store, "RENEW_S", 0.1)


def test_a_directory_is_one_runs_until_its_process_ends_however_that_may_be(tmp_path: Path, holder: Holder) -> None:
    place = tmp_path / "steps"
    holder.take(place)
    with pytest.raises(CheckpointError) as caught:
        train(RULE, 2, **CHOICES, settings=kept(place))
    said = str(caught.value)
    assert f"process {holder.process.pid} on {host_name()}, since 20" in said and "is in use by another run" in said
    assert "give checkpoint= another place" in said and not steps(place)

    DirectoryClaim(place, "other").take()  # another process of the same run may write there as well
    with pytest.raises(CheckpointError, match="in use"):
        DirectoryClaim(place, "mine").check()
    train(RULE, 2, **CHOICES, settings=kept(place / "inner"))  # several runs in folders of one place
    holder.kill()
    train(RULE, 2, **CHOICES, settings=kept(place))
    assert steps(place)


@pytest.mark.slow
def test_a_run_whose_place_was_taken_by_another_one_ends(tmp_path: Path, holder: Holder) -> None:
    """Its directory was moved away, or its lock lost: the newer run has it."""
    place = tmp_path / "steps"

    mine = DirectoryClaim(place, "mine")
    mine.take()
    mine.check()
    (place / claim.LOCK).unlink()
    holder.take(place)
    with pytest.raises(CheckpointError, match="in use by another run"):
        mine.check()


def test_a_lock_that_cannot_be_read_costs_a_step_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checks, check = count(), DirectoryClaim.check

    def unreadable_once(self: DirectoryClaim) -> None:
        if not next(checks):
            raise CheckpointError(f"{tmp_path} cannot be written: [Errno 5] Input/output error")
        check(self)

    monkeypatch.setattr(DirectoryClaim, "check", unreadable_once)
    train(RULE, 2, **CHOICES, settings=kept(tmp_path / "steps", keep=99))
    assert "Errno 5" in caplog.text and "training goes on" in caplog.text
    found = steps(tmp_path / "steps")
    caplog.clear()
    monkeypatch.setattr(DirectoryClaim, "check", check)
    train(RULE, 2, **CHOICES, settings=kept(tmp_path / "all", keep=99))
    assert len(steps(tmp_path / "all")) == len(found) + 1 and "Errno 5" not in caplog.text


def test_a_run_that_loses_its_place_writes_nothing_more_and_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def lost_at_the_second_step(self: DirectoryClaim) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise claim.in_use("there", {"pid": 4711, "host": "elsewhere", "since": "noon"})

    monkeypatch.setattr(DirectoryClaim, "check", lost_at_the_second_step)
    with pytest.raises(Exception, match="process 4711 on elsewhere, since noon"):
        train(RULE, 1, **CHOICES, settings=kept(tmp_path / "steps"))
    assert len(steps(tmp_path / "steps")) == 1


@pytest.mark.parametrize("depth", [0, 1])
def test_a_file_in_the_way_is_found_before_the_training(depth: int, tmp_path: Path) -> None:
    place = tmp_path / "steps" / "inner" if depth else tmp_path / "steps"
    (tmp_path / "steps").write_text("notes")
    program = Program(RULE, **CHOICES, settings=kept(place))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=f"{re.escape(str(place))} (cannot be written|is no directory)"):
        simulate(program, 2)
    assert (tmp_path / "steps").read_text() == "notes"


@pytest.mark.parametrize("number", ["ENOSPC", "EROFS", "EACCES"])
def test_a_full_or_forbidden_disk_is_found_before_the_training(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    def refuse(self: DirectoryClaim) -> None:
        code = getattr(errno, number)
        raise OSError(code, os.strerror(code), "there")

    monkeypatch.setattr(DirectoryClaim, "_probe", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be written \(.+: there\); give checkpoint= a directory"):
        train(RULE, 2, **CHOICES, settings=kept(tmp_path / "steps"))


# -- leases ------------------------------------------------------------------------------------------------------------
class LeaseObject:
    """One object."""

    def __init__(self, **said: Any) -> None:
        self.data = json.dumps(said).encode() if said else b""
        self.reads = 0

    def read(self) -> bytes:
        self.reads += 1
        return self.data

    def write(self, data: bytes) -> None:
        self.data = data

    def delete(self) -> None:
        self.data = b""

    def lease(self, run: str) -> Lease:
        return Lease("s3://bucket/run", run, self.read, self.write, self.delete)


def test_a_lease_that_is_renewed_is_respected() -> None:
    store = LeaseObject(run="other", host="elsewhere", pid=4711, since="noon")

    def renewed() -> bytes:
        store.reads += 1
        store.data = json.dumps({**json.loads(store.data), "renewal": store.reads}).encode()
        return store.data

    store.read = renewed  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="process 4711 on elsewhere, since noon"):
        store.lease("mine").take()
    assert json.loads(store.data)["run"] == "other"


@pytest.mark.parametrize(
    ("said", "at_once"),
    [
        ({}, True),
        ({"run": "mine", "host": "elsewhere", "pid": 1}, True),  # an earlier start of this run, on another host
        ({"run": "other", "host": host_name(), "pid": (1 << 22) + 5}, True),  # a process of this host that is gone
        ({"run": "other", "host": "elsewhere", "pid": 1}, False),  # killed with -9, and not renewed any more
    ],
)
def test_a_lease_of_nobody_is_taken(said: dict[str, Any], at_once: bool) -> None:
    store = LeaseObject(**said)
    one = store.lease("mine")
    one.take()
    assert json.loads(store.data)["run"] == "mine" and (store.reads == 1) == at_once
    one.check()
    one.release()
    assert store.data == b""


def test_of_two_that_came_at_once_the_newer_writer_stays() -> None:
    store = LeaseObject()
    first, second = store.lease("first"), store.lease("second")
    first.take()
    store.data = b""  # the second has read before the first wrote
    second.take()
    second.check()
    with pytest.raises(CheckpointError, match="in use by another run"):
        first.check()
    first.release()
    assert json.loads(store.data)["run"] == "second"
    second.release()
