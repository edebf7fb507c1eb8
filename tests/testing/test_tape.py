# SPDX-License-Identifier: Apache-2.0
"""Flight tapes: what is recorded comes out again, what-ifs follow by hand, and what is no tape is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from devtools.storm.control import ControlStorm
from devtools.storm.elastic import StormSettings
from devtools.storm.seeds import storm
from devtools.storm.tape import Played, read
from devtools.storm.what_if import Changes, changed, replay

from paceline.errors import MismatchError, PacelineError

TERMS = {"min_workers": 1, "max_workers": 4, "timeout_s": 30.0, "grace_s": None, "start_s": 1.0, "expected": 2}
TERMS["quorum_s"] = 86400.0
BEGIN: dict[str, Any] = {"kind": "tape", "at_s": 1.0, "version": 1, "terms": TERMS, "generation": 0, "exchange": 0}
BATCH_S, BLOCK, SENT = 0.5, 2, 1000


def event(kind: str, at_s: float, **about: Any) -> dict[str, Any]:
    return {"kind": kind, "at_s": at_s, **about}


def steady(exchanges: int = 4) -> list[dict[str, Any]]:
    """Two workers that join at second 2, begin at once, and make BLOCK minibatches of BATCH_S for each exchange."""
    said = [BEGIN, event("program", 2.0, rule=f"bmuf(period={BLOCK})", numbers=1000)]
    said += [event("joined", 2.0, worker=worker, host=f"host{worker}") for worker in (0, 1)]
    places = [[worker, f"host{worker}", "127.0.0.1", 1] for worker in (0, 1)]
    said += [event("generation", 2.0, number=1, members=places, exchange=0)]
    said += [event("holds", 2.0, worker=worker, exchange=0) for worker in (0, 1)]
    said += [event("data", 2.0, loader=0, epoch=0, total=4 * 2 * BLOCK * exchanges, unit=4, most=16)]
    for number in range(1, exchanges + 1):
        rows = [[worker, 0.0, BLOCK, 4 * BLOCK, 1, SENT, 0.0] for worker in (0, 1)]
        said += [event("exchange", 2.0 + number * BLOCK * BATCH_S, exchange=number, generation=1, workers=rows)]
    return said


def written(folder: Path, said: list[dict[str, Any]]) -> Path:
    (folder / "control.jsonl").write_text("".join(json.dumps(one) + "\n" for one in said))
    return folder


class Recording(ControlStorm):
    """A storm whose control plane writes a tape."""

    flight = True

    def _told(self, kind: str, about: dict[str, Any]) -> None:
        super()._told(kind, about)
        lines: list[dict[str, Any]] = self.__dict__.setdefault("lines", [])
        lines.append(event(kind, round(self.world.now, 3), **json.loads(json.dumps(about))))


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])
def test_a_recorded_run_has_the_same_members_again(seed: int, tmp_path: Path) -> None:
    """Workers that join and are killed at any moment: the same generations, for whatever seed of the replay."""
    recording = Recording(seed, StormSettings(faults=("kill_worker", "join")))
    assert recording.run().problems == []
    tape = read(written(tmp_path, recording.__dict__["lines"]))
    assert len(tape.generations) > 1 and tape.exchanges > 2
    for again in range(3):
        found = replay(again, Played(tape))
        assert found.outcome.problems == [] and (found.lost, found.repeated) == (0, 0)
        assert found.same, (tape.generations, again)


@pytest.mark.parametrize(
    ("changes", "exchanges", "seconds"),
    [
        (Changes(mbit=0.016), 4, 4 * (1.0 + 0.5)),  # 1000 bytes are 8000 bits: half a second at 16 kbit/s
        (Changes(rule="bmuf(period=4)"), 2, 2 * 2.0),  # blocks twice as long
        (Changes(mbit=0.016, rule="bmuf(period=2,codec='int8')"), 4, 4 * (1.0 + 0.5 * 0.2568)),
    ],
)
def test_what_if(changes: Changes, exchanges: int, seconds: float, tmp_path: Path) -> None:
    found = replay(0, changed(read(written(tmp_path, steady())), changes))
    assert found.outcome.problems == [] and found.outcome.exchanges == exchanges
    assert found.seconds - 1.0 == pytest.approx(seconds, abs=0.15)


def test_what_if_a_worker_had_not_died(tmp_path: Path) -> None:
    """Worker 1 dies after the first exchange of 8, and worker 2 takes its place a second later."""
    said = steady(8)
    cut = next(place for place, one in enumerate(said) if one.get("exchange") == 2)
    gone = event("lost", 3.1, worker=1, host="host1", why="its connection closed", came=1, reported=1, after_s=0.1)
    tape = read(written(tmp_path, [*said[:cut], gone, event("joined", 4.0, worker=2, host="host1")]))
    as_it_was = replay(0, Played(tape))
    without = replay(0, changed(tape, Changes(alive=(1,))))
    assert (as_it_was.deaths, without.deaths) == (1, 0)
    assert without.seconds - 1.0 == pytest.approx(8 * BLOCK * BATCH_S, abs=0.2) and without.seconds < as_it_was.seconds
    assert max(len(members) for _, members in _generations(without)) == 2
    with pytest.raises(MismatchError, match="worker 7 was not lost in this run; lost were \\[1\\]"):
        changed(tape, Changes(alive=(7,)))


def _generations(found: Any) -> list[tuple[int, list[str]]]:
    texts = [what for _, what in found.outcome.tape if what.startswith("generation ")]
    return [(number, text.split("(")[1].split(")")[0].split(", ")) for number, text in enumerate(texts)]


def test_a_seed_of_a_tape_has_one_history(tmp_path: Path) -> None:
    settings = StormSettings("tape", played=Played(read(written(tmp_path, steady()))))
    one, other = storm(5, settings), storm(5, settings)
    assert one.tape == other.tape and one.turns == other.turns


def bad(**about: Any) -> list[dict[str, Any]]:
    """The steady tape, with one more event."""
    return [*steady(), event(**about)]


def cell(place: int, value: Any) -> list[dict[str, Any]]:
    """The steady tape, with another value in its last exchange."""
    said = steady()
    said[-1]["workers"][0][place] = value
    return said


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([], "has no flight tape in it"),
        ([event("began", 1.0)], "has no flight tape in it"),
        ([BEGIN], "has nothing to replay"),
        ([{**BEGIN, "version": 2}], "of version 2, and this paceline reads 1"),
        ([{**BEGIN, "terms": 3}], "the terms is a JSON object"),
        ([{**BEGIN, "terms": {**TERMS, "min_workers": 9}}], "MIN <= MAX"),
        ([{**BEGIN, "at_s": float("nan")}], "at_s are seconds from 0 on, got nan"),
        ([{**BEGIN, "at_s": -1}], "at_s are seconds from 0 on, got -1"),
        ([{"kind": 3}], "is no event"),
        (bad(kind="joined", at_s=9, worker=0, host="x"), "worker 0 joins twice, or out of order"),
        (bad(kind="joined", at_s=9, worker=-1, host="x"), "a worker's number is a whole number"),
        (bad(kind="joined", at_s=9, worker=5, host=["x"]), "a host is text"),
        (bad(kind="lost", at_s=9, worker=5, came=0, reported=0, after_s=0), "worker 5 has not joined, or is gone"),
        (bad(kind="lost", at_s=9, worker=0, came=True, reported=0, after_s=0), "an exchange is a whole number"),
        (bad(kind="lost", at_s=9, worker=0, came=0, reported=0, after_s=1e300), "after_s are seconds"),
        (bad(kind="exchange", at_s=9, exchange=7, generation=1, workers=[]), "exchange 7 follows exchange 4"),
        (bad(kind="data", at_s=9, loader=0, epoch=0, total=1 << 62, unit=1, most=1), "no known length"),
        (bad(kind="data", at_s=9, loader=0, epoch=1 << 30, total=32, unit=1, most=1), "more than 1048576 minibatches"),
        (bad(kind="data", at_s=9, loader=0, epoch=0, total=32, unit=0, most=1), "places of a minibatch"),
        (bad(kind="gap", at_s=9, events=3), "events are missing here"),
        (cell(0, 9), "worker 9 has not joined"),
        (cell(1, "x"), "a wait are seconds"),
        (cell(2, 1.5), "minibatches is a whole number"),
    ],
)
def test_what_is_no_tape_is_refused(said: list[dict[str, Any]], why: str, tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as caught:
        read(written(tmp_path, said))
    assert why in str(caught.value) and "control.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"kind": "tape", "at_s"', "line 1 of .* is cut off"),
        (b'{"kind": "tape"\n', "line 1 of .* is no JSON"),
        (b"\x80\x04\x95.\n", "line 1 of .* is no JSON"),
        (b"[" * 100_000 + b"\n", "line 1 of .* is no JSON"),
        (b'{"kind": "x", "y": "' + b"y" * (1 << 20) + b'"}\n', "line 1 of .* has .* bytes, and may have"),
    ],
)
def test_bytes_that_are_no_tape_are_refused(text: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "control.jsonl").write_bytes(text)
    with pytest.raises(MismatchError, match=why):
        read(tmp_path)
    with pytest.raises(MismatchError, match="is no file: name the log directory"):
        read(tmp_path / "elsewhere")


def test_a_run_whose_number_of_members_grew_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="grow"):
        read(written(tmp_path, bad(kind="grown", at_s=9, wanted=4, before=2)))
