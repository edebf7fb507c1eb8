# SPDX-License-Identifier: Apache-2.0
"""Training in rounds: the same table on all workers, costs of all together, states to go on from."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from lightrnn_helpers import on_real_workers, same_bits, simulate, state_of
from paceline import CheckpointError, PeerLostError, UnsupportedError
from paceline_lightrnn import rounds, training
from paceline_lightrnn.corpus import Corpus
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.preparing import Data
from paceline_lightrnn.rates import share_of_rate
from paceline_lightrnn.settings import Course
from paceline_lightrnn.table import WordTable
from paceline_lightrnn.training import train
from paceline_lightrnn.vocabulary import Vocabulary

WORDS = 27
COURSE = Course(rounds=2, short=0, epochs=2, batch=4, window=5, windows=3, rate=0.02, save_every=3)
BOTH = {"pass": replace(COURSE, short=2, share=0.4, rounds=1), "training": replace(COURSE, costs="training")}
"""By the way in which costs are gathered."""


def chain(n: int, seed: int = 0) -> Corpus:
    """Words of which each has few that follow it."""
    generator = np.random.default_rng(seed)
    word, found = 0, []
    for _ in range(n):
        word = (3 * word + int(generator.integers(0, 3))) % WORDS
        found.append(word)
    return Corpus(np.array(found, dtype=np.int32))


def data() -> Data:
    names = ["</s>", "<unk>", *(f"w{k}" for k in range(WORDS - 2))]
    return Data(Vocabulary(names, [1] * WORDS), chain(300), chain(450, seed=1))


def model() -> LightRNN:
    torch.manual_seed(3)
    return LightRNN(WordTable.random(WORDS, seed=1), 8)


def trained(folder: Path, rule: str = "sync", course: Course = COURSE, **more: Any) -> tuple[LightRNN, Any]:
    mine = model()
    return mine, train(mine, data(), course, folder, rule=rule, **more)


def test_the_rate_begins_low_rises_and_falls() -> None:
    shares = [share_of_rate(k / 100) for k in range(101)]
    assert max(shares) == pytest.approx(1.0, abs=1e-3) and shares[0] < 0.1 and shares[-1] == pytest.approx(0.05)
    assert shares[2:] == sorted(shares[2:], reverse=True)


def test_rounds_of_one_worker(tmp_path: Path) -> None:
    first = model()
    mine, history = trained(tmp_path)
    assert [row["round"] for row in history] == [1, 2]
    assert history[0]["words"] == 600 and history[0]["cost_after"] < history[0]["cost_before"]
    assert history[0]["lower_bound"] <= history[0]["cost_after"] * (1 + 1e-6)
    assert "cost_before" not in history[1]
    assert history[1]["perplexity"] < history[0]["perplexity"] < WORDS
    assert mine.table != first.table and LightRNN.load(tmp_path).table == mine.table
    assert json.loads((tmp_path / "history.json").read_text())["rounds"] == history
    assert not mine.training


def test_the_folder_is_made_before_anything_is_written(tmp_path: Path) -> None:
    course = replace(COURSE, epochs=1, save_every=1000)  # so that the first file is that of the costs
    mine, _ = trained(tmp_path / "not" / "there", course=course)
    assert LightRNN.load(tmp_path / "not" / "there").table == mine.table


def test_short_rounds_read_a_part_of_the_text_each(tmp_path: Path) -> None:
    course = replace(COURSE, short=2, share=0.2, rounds=1)
    (mine, history), (other, _) = simulate(lambda: trained(tmp_path, "bmuf(period=2)", course), 2)
    assert [row["words"] for row in history] == [60, 60, 600]
    assert all(row["cost_after"] <= row["cost_before"] for row in history[:2]) and "cost_before" not in history[2]
    assert mine.table == other.table != model().table
    with pytest.raises(UnsupportedError, match="no more than all of it; got 3 rounds with a share of 0"):
        replace(COURSE, short=3, share=0.5)


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=4)", "asgd"])
def test_workers_have_one_table_and_one_model(rule: str, tmp_path: Path) -> None:
    def program() -> Any:
        mine, history = trained(tmp_path, rule)
        return mine.table.cells, state_of(mine), history

    (cells, state, history), *others = simulate(program, 3)
    assert history[0]["words"] == history[1]["words"] == 600  # every word once an epoch, on one of the workers
    for other in others:
        assert torch.equal(other[0], cells) and same_bits(other[1], state)
        assert [row["perplexity"] for row in other[2]] == [row["perplexity"] for row in history]
    assert not torch.equal(cells, model().table.cells)
    assert history[0]["cost_after"] < history[0]["cost_before"]


def gathered(mine: LightRNN, part: tuple[int, int] = (0, 1)) -> list[torch.Tensor]:
    return list(rounds.gather(mine, chain(600), length=15, window=5, batch=4, part=part).tensors())


@pytest.mark.parametrize("most", [rounds.DENSE_BYTES, 0], ids=["dense", "factored"])
def test_costs_of_all_workers_add_up_to_those_of_one(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = model()
    monkeypatch.setattr(rounds, "DENSE_BYTES", most)
    parts = [gathered(mine, (k, 3)) for k in range(3)]
    for whole, *some in zip(gathered(mine), *parts, strict=True):
        assert torch.allclose(whole, torch.stack(some).sum(0), rtol=1e-4, atol=1e-3)
        assert float(whole.sum()) > 0


def test_costs_may_be_gathered_while_training(tmp_path: Path) -> None:
    _, history = trained(tmp_path, course=replace(COURSE, costs="training", save_every=99))
    assert history[0]["cost_after"] < history[0]["cost_before"]


class Killed(Exception):
    """In place of a killed process."""


class Killer:
    """Dies at the n-th word about something."""

    def __init__(self, about: str, at: int) -> None:
        self.about, self.left = about, at

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        if what.startswith(self.about):
            self.left -= 1
            if not self.left:
                raise Killed

    def say(self, text: str) -> None:
        pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[LightRNN, Any]]:
    """Trainings that nobody killed, by the way in which costs are gathered."""
    return {
        costs: trained(tmp_path_factory.mktemp(costs), course=replace(course, save_every=99))
        for costs, course in BOTH.items()
    }


@pytest.mark.parametrize(
    ("about", "at", "costs"),
    [
        ("round 2", 2, "pass"),
        ("round 3", 5, "pass"),
        ("allocating", 1, "pass"),
        ("round 1", 9, "training"),
        ("round 2", 2, "training"),
    ],
)
def test_a_training_that_was_killed_goes_on_with_the_same_bits(
    about: str, at: int, costs: str, whole: dict[str, tuple[LightRNN, Any]], tmp_path: Path
) -> None:
    course = BOTH[costs]
    with pytest.raises(Killed):
        trained(tmp_path, course=course, show=Killer(about, at))
    again, later = trained(tmp_path, course=course)
    assert same_bits(state_of(again), state_of(whole[costs][0])) and again.table == whole[costs][0].table
    assert untimed(later) == untimed(whole[costs][1])


def test_costs_kept_as_factors_are_the_same(
    whole: dict[str, tuple[LightRNN, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "DENSE_BYTES", 0)
    _, factored = trained(tmp_path, course=replace(BOTH["pass"], save_every=99))
    for name in ("cost_before", "cost_after"):
        assert factored[0][name] == pytest.approx(whole["pass"][1][0][name], rel=1e-3)
    with pytest.raises(UnsupportedError, match='costs="pass"'):
        trained(tmp_path / "other", course=replace(COURSE, costs="training"))


def untimed(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("seconds", "words_per_s", "allocation_s")
    return [{name: value for name, value in row.items() if name not in timed} for row in history]


def test_what_two_workers_began_three_end(tmp_path: Path) -> None:
    def program(workers: int, **more: Any) -> list[Any]:
        return simulate(lambda: trained(tmp_path / "run", "bmuf(period=4)", **more), workers)

    with pytest.raises(Killed):
        program(2, show=Killer("round 2", 2))
    (first, history), (second, _), (third, _) = program(3)
    assert len(history) == 2 and history[1]["words"] == pytest.approx(600, abs=100)
    assert first.table == second.table == third.table


def test_a_finished_training_is_left_as_it_is(tmp_path: Path) -> None:
    first, history = trained(tmp_path)
    again, same = trained(tmp_path)
    assert same == history and same_bits(state_of(first), state_of(again))


def test_damaged_costs_are_gathered_anew(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, show=Killer("allocating", 1))
    (tmp_path / "costs.safetensors").write_bytes(b"damaged")
    _, history = trained(tmp_path)
    assert history[0]["cost_after"] < history[0]["cost_before"]


def test_costs_of_another_table_or_of_no_kind_are_refused(tmp_path: Path) -> None:
    mine, path = model(), tmp_path / "costs"
    rounds.save_costs(path, rounds.gather(mine, chain(60), length=15, window=5), mine.table)
    again = rounds.load_costs(path, mine)
    assert all(torch.equal(a, b) for a, b in zip(again.tensors(), rounds.load_costs(path, mine).tensors(), strict=True))
    mine.table = WordTable.random(WORDS, seed=2)
    with pytest.raises(CheckpointError, match="another table"):
        rounds.load_costs(path, mine)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="gather them anew"):
        rounds.load_costs(path, mine)
    mine.table.save(path)
    with pytest.raises(CheckpointError, match="holds no costs"):
        rounds.load_costs(path, mine)


def long_work(monkeypatch: pytest.MonkeyPatch, outcome: Callable[[], Any]) -> Callable[[], Any]:
    """A run in which worker 0 does something that lasts for several beats."""
    monkeypatch.setattr(rounds, "BEAT_S", 0.001)
    told = threading.Event()
    tell, beats = rounds._tell, []

    def count(run: Any, word: int = rounds.RUNNING) -> int:
        beats.append(word)
        if len(beats) > 5:
            told.set()
        return tell(run, word)

    monkeypatch.setattr(rounds, "_tell", count)

    def work() -> Any:
        assert told.wait(60)
        return outcome()

    def program() -> Any:
        mine = model()
        with paceline.attach(mine, torch.optim.SGD(mine.parameters(), lr=0.1), "bmuf") as run:
            try:
                return rounds.by_one(run, work)
            except (ValueError, PeerLostError) as error:
                return type(error)

    return program


def test_the_others_hear_of_worker_0_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulate(long_work(monkeypatch, lambda: 7), 3) == [7, None, None]


def test_the_others_hear_that_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("no")

    assert simulate(long_work(monkeypatch, fail), 3) == [ValueError, PeerLostError, PeerLostError]


def test_the_state_folder_keeps_two(tmp_path: Path) -> None:
    trained(tmp_path)
    assert len(list((tmp_path / training.STATE).iterdir())) == training.KEEP


@pytest.mark.processes
def test_real_processes_add_up_costs_and_get_one_table(tmp_path: Path) -> None:
    one, other = on_real_workers("training_program.py", 2, tmp_path)
    assert one == other and one["costs"] is True
    assert one["table"] != rounds.table_sum(model().table)
