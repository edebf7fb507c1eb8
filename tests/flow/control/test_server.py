# SPDX-License-Identifier: Apache-2.0
"""The control plane over sockets: who comes and goes, what is committed, and what a server that starts again knows."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from paceline.data.ledger.epoch_ledger import Question
from paceline.errors import (
    CheckpointError,
    GivenUpError,
    MismatchError,
    OverError,
    PacelineError,
    PeerLostError,
    RefusedError,
)
from paceline.flow.control.client import ControlClient
from paceline.flow.control.messages import About, Generation, Terms
from paceline.flow.control.server import ControlServer, ServerConnection
from tests.communication.test_tls import Authority
from tests.flow.control.cluster import HERE, SOON, Log, begin, control, member, together, wait_for, work

TERMS = Terms(timeout_s=SOON)
TWO = Terms(min_workers=2, timeout_s=SOON)


def commit(one: ControlClient, exchange: int, generation: int | None = None) -> bool:
    number = one.generation.number if generation is None else generation
    return one.commit(number, exchange, [], {}).committed


@pytest.mark.parametrize("secure", [False, True])
def test_an_epoch_is_done_once_by_all(secure: bool, tmp_path: Path) -> None:
    tls = Authority(tmp_path, "job").worker("one") if secure else None
    with control(Terms(3, timeout_s=SOON), tmp_path / "control.json", tls) as (server, log):
        workers = [member(server.port, tls) for _ in range(3)]
        merged = list(chain(*together(*(partial(work, one, 40) for one in workers))))
        assert sorted(place for *_, begin, end in merged for place in range(begin, end)) == list(range(40))
        for one in workers:
            one.leave()
        log.wait("left", worker=2)
        assert server.status()["finished"] and not log.of("lost") and len(log.of("left")) == 3
        with pytest.raises(OverError, match="the run is over"):
            member(server.port, tls)


def test_below_the_quorum_no_worker_enters_and_all_get_the_reason() -> None:
    with control(TWO) as (server, log):
        first = member(server.port)
        log.wait("paused")
        told: list[str] = []
        heard = threading.Event()

        def pause(why: str) -> None:
            told.append(why)
            heard.set()

        second = member(server.port)
        assert [one.enter().workers for one in (first, second)] == [[0, 1], [0, 1]]
        assert first.paused == "" and first.generation.donor is None
        first.on_pause(pause)
        second.close()
        assert heard.wait(SOON) and "1 of at least 2" in told[0]
        changed = threading.Event()
        first.on_change(lambda generation: changed.set())
        third = member(server.port)
        assert third.enter().workers == [0, 2]
        assert changed.wait(SOON) and first.enter().number == third.generation.number
        first.close()
        third.close()


def test_a_worker_gives_up_a_control_plane_that_closes_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would join again and again, each time as a new worker, and never be a member."""

    def welcome_only(self: ServerConnection, *frame: Any) -> None:
        with contextlib.suppress(PacelineError):  # a worker that has left
            self.channel.send(*frame[:2], note=frame[2])
        self.channel.close()

    monkeypatch.setattr(ServerConnection, "send", welcome_only)
    with control(TERMS) as (server, log):
        one = member(server.port, timeout_s=1.0)
        with pytest.raises(PeerLostError, match="has closed every connection for 1 s before it sent anything"):
            one.enter()
        one.close()
        assert 2 <= len(log.of("joined")) <= 12, "there is a pause between two attempts"


def test_a_worker_joins_at_a_commit_and_gets_the_state_from_a_member() -> None:
    with control(TERMS) as (server, log):
        first = member(server.port)
        begin(first)
        assert commit(first, 1)
        second = member(server.port)
        log.wait("joined", worker=1)
        assert second.generation.number == 0
        verdict = first.commit(1, 2, [], {})
        assert verdict.committed and verdict.generation.workers == [0, 1]
        entered = second.enter()
        assert entered == verdict.generation
        assert (entered.exchange, entered.newcomers, entered.donor, entered.restored) == (2, {1}, 0, False)
        with pytest.raises(MismatchError, match="without its state"):
            commit(second, 3)
        second.holds_state(entered.number)
        assert together(lambda: commit(first, 3), lambda: commit(second, 3)) == [True, True]
        first.close()
        second.close()


def test_idle_and_slow_members_are_called_to_an_exchange() -> None:
    with control(Terms(min_workers=1, timeout_s=SOON, grace_s=0.0, start_s=SOON, expected=3)) as (server, _):
        one, two, three = (member(server.port) for _ in range(3))
        for each in (one, two, three):
            begin(each)
        assert one.ask(Question(0, 0, 1, dry=True)) == ("work", (0, 0, 0, 1))
        assert two.ask(Question(0, 0, 1, dry=True)) == ("nothing", None)
        assert two.called == 0 and three.ask(Question(0, 0, 1)) == ("nothing", None)
        one.starts(1)
        assert two.wait_news(SOON) and two.called == 1
        assert three.wait_news(SOON) and three.called == 1  # a grace of no seconds
        mark = (0, 0, 0, 1)
        verdicts = together(
            lambda: one.commit(1, 1, [mark], {}), lambda: two.commit(1, 1, [], {}), lambda: three.commit(1, 1, [], {})
        )
        assert all(verdict.committed for verdict in verdicts)
        assert two.ask(Question(0, 0, 1, dry=True)) == ("over", None)
        for each in (one, two, three):
            each.close()


def test_a_straggler_is_lost_and_the_log_has_each_workers_activity() -> None:
    with control(Terms(timeout_s=1.0, start_s=SOON, expected=2)) as (server, log):
        one, two = member(server.port), member(server.port)
        begin(one), begin(two)
        two.doing("reads the file x", 7)
        log.wait("holds", worker=1)
        verdict = one.commit(1, 1, [], {})
        assert not verdict.committed and verdict.generation.workers == [0]
        dump = {each["worker"]: each for each in log.wait("stuck")["workers"]}
        assert dump[1]["doing"] == "reads the file x" and dump[1]["step"] == 7 and not dump[1]["commits"]
        with pytest.raises(GivenUpError, match="waited"):
            two.ask(Question(0, 0, 1))
        one.close()
        two.close()


def test_another_program_and_one_too_many_are_refused() -> None:
    with control(Terms(max_workers=1, timeout_s=SOON)) as (server, _):
        one = member(server.port, rule="bmuf", seed=1)
        with pytest.raises(RefusedError, match=r"rule is 'sync' here and 'bmuf' there"):
            member(server.port, rule="sync", seed=1)
        with pytest.raises(RefusedError, match="takes no more"):
            member(server.port, rule="bmuf", seed=1)
        one.close()


def test_a_server_that_starts_again_goes_on_from_its_record(tmp_path: Path) -> None:
    record, log = tmp_path / "control.json", Log()
    workers: list[ControlClient] = []
    with control(Terms(2, timeout_s=SOON), record, log=log) as (server, _):
        port = server.port
        workers += [member(port), member(port)]
        commits = threading.Semaphore(0)
        results: list[list[tuple[int, int, int, int]]] = []
        threads = [
            threading.Thread(target=lambda one=one: results.append(work(one, 400, commits.release)), daemon=True)
            for one in workers
        ]
        for thread in threads:
            thread.start()
        for _ in range(10):
            assert commits.acquire(timeout=SOON)
    for _ in range(3):
        with control(Terms(2, timeout_s=SOON), record, port=port, log=log):
            log.wait("back", worker=1)
            for _ in range(6):
                assert commits.acquire(timeout=SOON)
            log.events.clear()
    with control(Terms(2, timeout_s=SOON), record, port=port, log=log) as (server, _):
        for thread in threads:
            thread.join(SOON)
        merged = list(chain(*results))
        assert sorted(place for *_, low, high in merged for place in range(low, high)) == list(range(400))
        assert server.status()["generation"] == 1 and not log.of("lost")
        for one in workers:
            one.leave()


def test_members_that_do_not_reconnect_to_a_new_server_are_lost(tmp_path: Path) -> None:
    record = tmp_path / "control.json"
    terms = Terms(1, timeout_s=6.0, start_s=SOON, expected=2)  # a quarter of it to come back
    with control(terms, record) as (server, _):
        one, two = member(server.port), member(server.port)
        begin(one), begin(two)
        two.ask(Question(0, 0, 1))
    two.close()
    with control(terms, record, port=server.port) as (_, log):
        log.wait("lost", worker=1)
        log.wait("generation", number=2)
        assert one.ask(Question(0, 0, 1)) == ("work", (0, 0, 0, 1))
        one.close()


def test_waits_end_with_an_error_without_a_server(tmp_path: Path) -> None:
    with control(TERMS) as (server, _):
        one = member(server.port, timeout_s=2.0)
        begin(one)
    with pytest.raises(PeerLostError, match=rf"port {server.port}, was lost and did not come back within 2 s"):
        one.commit(1, 1, [], {})
    one.close()


def test_a_worker_that_the_record_does_not_know_is_given_up() -> None:
    with control(TERMS) as (server, _):
        one = member(server.port)
        begin(one)
    with control(TERMS, port=server.port):
        with pytest.raises(GivenUpError, match="without its record"):
            one.commit(1, 1, [], {})
    one.close()


def test_a_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    record = tmp_path / "control.json"
    for text in ("{", '{"format": "other"}', '{"format": "paceline control 1"}', "[]"):
        record.write_text(text)
        with pytest.raises(CheckpointError, match=r"control\.json.*move it away"):
            ControlServer(HERE, 0, None, TERMS, record)


def test_a_record_is_for_its_owner_only(tmp_path: Path) -> None:
    with control(TERMS, tmp_path / "control.json") as (server, _):
        one = member(server.port)
        one.enter()
        assert (tmp_path / "control.json").stat().st_mode & 0o077 == 0
        one.close()


def test_a_run_that_waits_too_long_for_workers_is_over() -> None:
    with control(Terms(2, timeout_s=SOON, quorum_s=0.2)) as (server, log):
        one = member(server.port)
        with pytest.raises(GivenUpError, match="gave up"):
            one.enter()
        log.wait("ended")
        with pytest.raises(RefusedError, match="gave up"):
            member(server.port)
        one.close()


def test_a_held_worker_outlasts_its_timeout_while_the_control_plane_answers_and_no_longer() -> None:
    """Every answered heartbeat begins its wait anew; without an answer the wait ends as every other does."""
    about = About("host", HERE, 1, {"rule": "block"}, first=1)
    with control(Terms(timeout_s=SOON, expected=1)) as (server, log):
        first = ControlClient(HERE, server.port, about, None, SOON)
        begin(first)
        second = ControlClient(HERE, server.port, about, None, 1.0)
        log.wait("held", workers=1, wanted=1)
        assert "as many workers as are worth it" in wait_for(lambda: second.held)
        began = second._moved
        entered: list[Exception | Generation] = []

        def enter() -> None:
            try:
                entered.append(second.enter())
            except PeerLostError as error:
                entered.append(error)

        waits = threading.Thread(target=enter, daemon=True)
        waits.start()
        wait_for(lambda: second._moved > began + 2.0)
        assert waits.is_alive()
        wait_for(lambda: "waits to join" in server.status()["waiting"][0]["doing"])
        server.close()
        waits.join(SOON)
        assert isinstance(entered[0], PeerLostError) and "control plane" in str(entered[0])
        first.close()
        second.close()


def test_a_held_worker_that_is_admitted_has_deadlines_again() -> None:
    about = About("host", HERE, 1, {"rule": "block"}, first=1)
    with control(Terms(timeout_s=SOON, expected=1)) as (server, _):
        workers = [ControlClient(HERE, server.port, about, None, SOON) for _ in range(2)]
        begin(workers[0])
        assert workers[0].most == 1024 and wait_for(lambda: workers[1].held)
        assert workers[0].commit(1, 1, [], {}, wanted=2).generation.wanted == 2
        assert workers[1].enter().workers == [0, 1] and not workers[1].held
        for one in workers:
            one.close()


def test_a_failed_exchange_is_repeated_and_a_member_accused_thrice_is_lost() -> None:
    with control(Terms(2, timeout_s=SOON, start_s=SOON, expected=3)) as (server, log):
        workers = [member(server.port) for _ in range(3)]
        for one in workers:
            begin(one)
        for number in (2, 3):
            made = together(*(partial(one.failed, number - 1, "reset", [1]) for one in workers))
            assert [one.number for one in made] == [number] * 3
        with pytest.raises(GivenUpError, match="could not exchange with it"):
            together(*(partial(one.failed, 3, "reset", [1]) for one in workers))
        log.wait("lost", worker=1)
        assert log.wait("generation", number=4)["members"] == [[0, "host", HERE, 1], [2, "host", HERE, 1]]
        for one in workers:
            one.close()
