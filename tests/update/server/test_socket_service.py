# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rules between real processes: the same end for all, and what becomes of those who fail."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from devtools.emulation import EmulatedNetwork
from safetensors.torch import load_file

from paceline.update.server import membership as members
from tests.communication.test_tls import Authority
from tests.helpers import same_bits
from tests.processes.asynchronous_programs import RULES
from tests.processes.launch import DEADLINE_S, Ended, Launch, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
MODULE = "asynchronous_programs"
LONG = "60"
"""A deadline in seconds that no test may have to wait for."""


def models(directory: Path, name: str, ranks: list[int]) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """The model on which all agree, and everybody's numbers."""
    states = [load_file(directory / f"{name}.{rank}.safetensors") for rank in ranks]
    numbers = [{k.removeprefix("number."): float(s.pop(k)) for k in [*s] if k.startswith("number.")} for s in states]
    for state in states[1:]:
        assert same_bits(state, states[0]), f"{name}: the workers' models differ"
    assert all(bool(torch.isfinite(v).all()) for v in states[0].values())
    return states[0], numbers


def events(log: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    """The whole lines of a log that are of this kind."""
    path = log / f"rank-{rank:03d}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def until_lost(launch: Launch, ranks: list[int], lost: int) -> list[dict[str, Any]]:
    """Wait until all of `ranks` have written that `lost` is; what they wrote."""
    end, found = time.monotonic() + DEADLINE_S, []
    for rank in ranks:
        while not (said := [e for e in events(launch.directory / "log", rank, "lost") if e["rank_lost"] == lost]):
            assert time.monotonic() < end and launch.processes[rank].poll() is None, launch.said()
            time.sleep(0.02)
        found += said
    return found


def until_takeover(launch: Launch, rank: int, of: int) -> list[dict[str, Any]]:
    """Wait until `rank` has written that it has the slices of `of`; what it wrote."""
    end = time.monotonic() + DEADLINE_S
    while not (said := [e for e in events(launch.directory / "log", rank, "takeover") if e["slice_of"] == of]):
        assert time.monotonic() < end, launch.said()
        time.sleep(0.02)
    return said


class Faulty(Launch):
    """Processes that train until the test has seen enough."""

    def __init__(
        self, directory: Path, workers: int, rule: str, kind: str = "sgd", timeout_s: str = LONG, least: int = 60
    ) -> None:
        super().__init__("faulty", workers, directory, rule, kind, timeout_s, str(least), module=MODULE)

    def under_way(self) -> None:
        """Wait until all train."""
        for rank in range(len(self.processes)):
            self.until(f"going.{rank}")

    def strike(self, rank: int, which: signal.Signals) -> None:
        """Send a signal to one process."""
        os.killpg(self.processes[rank].pid, which)

    def survive(self, ranks: list[int]) -> list[Ended]:
        """Let those who are left come to the end; they all do, with one good model."""
        (self.directory / "enough").touch()
        ended = self.wait(ranks)
        assert all(one.code == 0 for one in ended.values()), self.said()
        _, numbers = models(self.directory, "model", ranks)
        assert all(one["after"] < 0.7 * one["before"] for one in numbers), numbers
        return list(ended.values())


# -- without faults -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """One launch for all that needs four workers and no fault: its directory, and what each worker said.

    Where several processes run the tests, the first of them launches, and the others read.
    """
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory = root / "varied"
    with (root / "varied.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "said.3").exists():
            launch_varied(directory)
    return directory, [json.loads((directory / f"said.{rank}").read_text()) for rank in range(4)]


def launch_varied(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    job, other = Authority(directory, "job"), Authority(directory, "other")
    (directory / "tls").mkdir()
    for rank in range(4):
        shutil.copytree(job.worker(f"worker{rank}").certificate.parent, directory / "tls" / str(rank))
    shutil.copytree(other.worker("stranger").certificate.parent, directory / "foreign")
    run("varied", 4, directory, module=MODULE)


Varied = tuple[Path, list[dict[str, Any]]]


def test_every_rule_ends_with_one_model(varied: Varied) -> None:
    """Also where workers have unequal data: those who end first are waited for by nobody."""
    (directory, _), workers = varied, 4
    for number, (rule, _) in enumerate(RULES):
        _, numbers = models(directory, str(number), list(range(workers)))
        assert all(one["after"] < 0.8 * one["before"] for one in numbers), (rule, numbers)
        for rank in range(workers):
            lines = events(directory / f"log.{number}", rank, "exchange")
            delays = [int(delay) for line in lines for delay in line.get("delays", {})]
            assert delays and min(delays) >= 0, rule
            if rule == "ssp(staleness=2)":  # between two reads of mine another may make 2 s + 1 steps
                assert max(delays) <= (workers - 1) * 5, delays
            (end,) = events(directory / f"log.{number}", rank, "close")
            assert end["minibatches"] == 40 + 10 * rank
            assert not events(directory / f"log.{number}", rank, "lost")


def test_lockstep_is_sync(varied: Varied) -> None:
    everybody = [0, 1, 2, 3]
    assert same_bits(models(varied[0], "ssp", everybody)[0], models(varied[0], "sync", everybody)[0])


def test_runs_one_after_another_and_a_group_of_the_users(varied: Varied) -> None:
    directory, said = varied
    assert [one.get("group") for one in said] == [None, 2, None, 2]
    models(directory, "group", [1, 3])
    models(directory, "all", [0, 1, 2, 3])


def test_hosts_of_several_names(varied: Varied) -> None:
    directory, said = varied
    assert all(one["hosts"] == ["host0", "host0", "host1", "host1"] for one in said)
    models(directory, "hosts", [0, 1, 2, 3])


def test_bytes_are_balanced_counted_and_those_of_the_formula(varied: Varied) -> None:
    _, said = varied
    for name in ("replicas", "exact"):
        sent = [one[name]["channels"] for one in said]
        assert sent == [one[name]["counted"] for one in said]
        mean = sum(one[name]["all"] for one in said) / 4
        assert all(mean / 1.2 < one[name]["all"] < 1.2 * mean for one in said), said
        assert all(mean / 1.2 < one < 1.2 * mean for one in sent), sent
    assert [one["exact"]["channels"] for one in said] == [one["formula"] for one in said]
    assert all(one["replicas"]["channels"] > one["exact"]["channels"] for one in said)


def test_what_is_not_finite_is_refused_and_said(varied: Varied) -> None:
    directory, _ = varied
    for number in range(2):
        models(directory, f"nan.{number}", [0, 1, 2, 3])
        refused = []
        for rank in range(4):
            lines = events(directory / f"nan.{number}", rank, "exchange")
            refused.append(sum(line.get("refused", 0) for line in lines))
        assert refused[1] > 0 and refused[0] == refused[2] == refused[3] == 0
    assert "of 16 pushes (inf or NaN in its contribution)" in (directory / "err.1").read_text()


def test_a_checkpoint_is_resumed(varied: Varied) -> None:
    directory, said = varied
    saved = load_file(directory / "checkpoint" / "global.safetensors")
    assert all(one["resumed"][0] == 10 for one in said)
    assert same_bits(models(directory, "checkpoint.1", [0, 1, 2, 3])[0], saved)  # resumed, and closed at once
    for name in ("checkpoint.0", "checkpoint.2"):
        models(directory, name, [0, 1, 2, 3])


def test_certificates_of_all_or_none(varied: Varied) -> None:
    directory, said = varied
    models(directory, "tls", [0, 1, 2, 3])
    for one in said:
        assert one["tls"] == "SSLSocket"
        assert one["none"].startswith("MismatchError: some workers have TLS certificates and some have none")
        assert one["foreign"].startswith("MismatchError: ")


def test_strangers_at_the_meeting_are_turned_away(varied: Varied) -> None:
    directory, _ = varied
    models(directory, "strangers", [0, 1, 2, 3])


def test_nobody_begins_where_one_cannot_connect(varied: Varied) -> None:
    _, said = varied
    assert said[2]["unreachable"].startswith("the way there is blocked")
    for rank in (0, 1, 3):
        assert "rank 2 on" in said[rank]["unreachable"] and "did not connect" in said[rank]["unreachable"]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(bool(EmulatedNetwork.possible()), reason=EmulatedNetwork.possible())
def test_between_hosts_that_have_addresses_of_their_own(tmp_path: Path) -> None:
    """Rank 0's host knows itself as 127.0.0.1 only; the others have to reach it all the same."""
    with EmulatedNetwork(2) as network:

        def place(rank: int) -> tuple[list[str], dict[str, str]]:
            address = network.address(0) if rank else "127.0.0.1"
            more = {"MASTER_ADDR": address, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            return network.prefix(rank), network.environment(rank) | more

        with Launch("hosts", 2, tmp_path, module=MODULE, place=place) as launch:
            assert all(one.code == 0 for one in launch.wait().values()), launch.said()
        models(tmp_path, "hosts", [0, 1])
        assert [(tmp_path / f"listened.{rank}").read_text() for rank in range(2)] == [
            network.address(rank) for rank in range(2)
        ]


# -- killed -------------------------------------------------------------------------------------
@pytest.mark.slow  # test_workers_are_killed_until_a_replica_is_gone kills more
@pytest.mark.parametrize(
    ("rule", "kind", "victim"), [("asgd", "adam", 0), pytest.param("easgd(period=4)", "sgd", 2, marks=pytest.mark.slow)]
)
def test_a_killed_worker_is_gone_and_the_others_go_on(rule: str, kind: str, victim: int, tmp_path: Path) -> None:
    """Its slices go to the next in rank order, with what the optimizer has kept; nobody waits for the deadline."""
    left = [rank for rank in range(3) if rank != victim]
    with Faulty(tmp_path, 3, rule, kind, least=600) as launch:  # so that every shard has been replicated
        launch.under_way()
        launch.strike(victim, signal.SIGKILL)
        heir = (victim + 1) % 3
        for event in until_lost(launch, left, victim):
            assert event["taken_over"] == [heir] and event["why"]
        assert {event["from"] for event in until_takeover(launch, heir, victim)} == {"replica"}
        (tmp_path / "save").touch()
        for rank in left:
            launch.until(f"saved.{rank}")
            assert "can no longer come to one point together" in (tmp_path / f"saved.{rank}").read_text()
        merged = [(tmp_path / f"merged.{rank}.safetensors").read_bytes() for rank in left]
        assert merged[0] == merged[1], "those that live merge, and have the same model"
        for one in launch.survive(left):
            assert f"rank {victim} on" in one.err and "is lost" in one.err


@pytest.mark.parametrize(
    ("rule", "kind"), [("dc_asgd", "sgd"), pytest.param("ssp(staleness=1)", "momentum", marks=pytest.mark.slow)]
)
def test_workers_are_killed_until_a_replica_is_gone(rule: str, kind: str, tmp_path: Path) -> None:
    """Two deaths are survived; with the third an owner and its neighbour are lost, and the last worker ends by name."""
    with Faulty(tmp_path, 4, rule, kind) as launch:
        launch.under_way()
        launch.strike(0, signal.SIGKILL)
        until_lost(launch, [1, 2, 3], 0)
        assert until_takeover(launch, 1, 0)
        launch.strike(2, signal.SIGKILL)
        until_lost(launch, [1, 3], 2)
        assert until_takeover(launch, 3, 2)
        launch.strike(1, signal.SIGKILL)
        ended = launch.wait([3])[3]
        assert ended.code != 0 and "no other worker has a replica of its slices" in ended.err, ended.err


def test_the_heir_has_a_replica_before_the_first_push(tmp_path: Path) -> None:
    """All begin with the same values."""
    with Faulty(tmp_path, 2, "asgd(period=1000000)") as launch:
        launch.under_way()
        launch.strike(1, signal.SIGKILL)
        until_lost(launch, [0], 1)
        assert {event["from"] for event in until_takeover(launch, 0, 1)} == {"replica"}
        launch.survive([0])


def test_who_is_lost_at_the_very_end_leaves_one_model(tmp_path: Path) -> None:
    """One had pulled everything already, and the new owner knows less: both end with what that one has."""
    with Launch("at_the_end", 3, tmp_path, module=MODULE) as launch:
        assert all(one.code == 0 for one in launch.wait([1, 2]).values()), launch.said()
        models(tmp_path, "model", [1, 2])
        assert [event["rank_lost"] for event in events(tmp_path / "log", 2, "lost")] == [0]


# -- stopped ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("workers", "rule", "victim"), [pytest.param(3, "asgd", 1, marks=pytest.mark.slow), (2, "ssp(staleness=2)", 1)]
)
def test_a_stopped_worker_is_given_up_and_learns_it(workers: int, rule: str, victim: int, tmp_path: Path) -> None:
    """After a quarter of the deadline, by name; when it goes on it ends with an error, and disturbs nobody."""
    left = [rank for rank in range(workers) if rank != victim]
    with Faulty(tmp_path, workers, rule, timeout_s="4") as launch:
        launch.under_way()
        launch.strike(victim, signal.SIGSTOP)
        until_lost(launch, left, victim)
        launch.strike(victim, signal.SIGCONT)
        ended = launch.wait([victim])[victim]
        assert ended.code != 0
        assert "PeerLostError: the other workers went on without this one" in ended.err, ended.err
        assert not events(tmp_path / "log", victim, "lost")
        launch.survive(left)
        for rank in left:
            assert [event["rank_lost"] for event in events(tmp_path / "log", rank, "lost")] == [victim]


@pytest.mark.slow  # a stopped one is
def test_a_worker_whose_program_stands_still_is_given_up(tmp_path: Path) -> None:
    """Its heartbeats go on; under a bound the other one would wait for its next step without an end."""
    with Faulty(tmp_path, 2, "ssp(staleness=2)", timeout_s="4") as launch:
        launch.under_way()
        (tmp_path / "stand.1").touch()
        (lost,) = until_lost(launch, [0], 1)
        assert "made no step for 4 s" in lost["why"]
        (tmp_path / "stand.1").unlink()
        ended = launch.wait([1])[1]
        assert ended.code != 0
        assert "PeerLostError: the other workers went on without this one" in ended.err, ended.err
        launch.survive([0])


# -- leaving ------------------------------------------------------------------------------------
def test_who_leaves_first_holds_up_nobody(tmp_path: Path) -> None:
    """Neither who has less data, and serves what it owns to the end, nor who fails; under a bound too."""
    with Faulty(tmp_path, 3, "ssp(staleness=1)") as launch:
        launch.under_way()
        (tmp_path / "leave.0").touch()
        (tmp_path / "raise.1").touch()
        until_lost(launch, [0, 2], 1)
        launch.survive([0, 2])
        assert "the user's own" in launch.wait([1])[1].err
        _, numbers = models(tmp_path, "model", [0, 2])
        assert numbers[0]["steps"] < numbers[1]["steps"]


def test_time_in_which_this_process_stood_still_counts_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(members.runtime, "monotonic", lambda: now[0])
    stall_detector = members.StallDetector(timeout_s=8.0)
    for _ in range(40):  # it runs, and hears nothing from somebody
        assert not stall_detector.overdue(100.0)
        now[0] += 0.2
    now[0] += 0.2
    assert stall_detector.overdue(100.0) and not stall_detector.overdue(101.0) and not stall_detector.stalled_s()
    now[0] += 60.0  # it was stopped
    assert not stall_detector.overdue(101.0) and stall_detector.stalled_s() == pytest.approx(60.0)
    for _ in range(41):
        now[0] += 0.2
        stall_detector.beat()
    assert stall_detector.overdue(101.0) and not stall_detector.stalled_s()
