# SPDX-License-Identifier: Apache-2.0
"""Training of a pair: the course's two phases, every method, workers under rules, states to go on from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import CheckpointError, DataError, UnsupportedError
from paceline.dual import evaluation, training
from paceline.dual.batches import Data, collate, pairs_of
from paceline.dual.classifier import Classifier, LabelPrior
from paceline.dual.learning import Reward
from paceline.dual.methods import BackTranslation, Dual
from paceline.dual.pair import DIRECTIONS, Pair
from paceline.dual.priors import PriorCourse, train_prior
from paceline.dual.rates import make_optimizer, rate
from paceline.dual.sequences import PADDING
from paceline.dual.settings import Constraint, Course, Looks, Mix, Rates
from paceline.dual.supervised import gap
from paceline.dual.training import has_state, train
from paceline.dual.words import Words
from tests.dual.tasks import (
    COURSE,
    HELD,
    LABELS,
    draw,
    labels_data,
    labels_pair,
    sequences,
    words_data,
    words_pair,
)
from tests.helpers import same_bits, simulate, state_of
from tests.processes.launch import Launch


def trained(folder: Path, course: Course = HELD, **more: Any) -> tuple[Pair, list[dict[str, Any]]]:
    pair = labels_pair()
    return pair, train(pair, more.pop("data", labels_data()), course, folder, **more)


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


# -- one worker -------------------------------------------------------------------------------------


def test_a_training_and_what_it_leaves(tmp_path: Path) -> None:
    words = Words(tuple("abcde"), tuple("ABCDE"))
    pair, rows = trained(tmp_path, words=words)
    assert [row["step"] for row in rows] == [0, 8, 12, 16, 24]
    assert [row["phase"] for row in rows] == ["warm", "warm", "warm", "dual", "dual"]
    assert rows[0]["exact_forward"] < 1 and rows[-1]["exact_forward"] == rows[-1]["exact_backward"] == 1
    assert rows[-1]["forward"] > rows[2]["forward"] > rows[0]["forward"]
    assert rows[2]["rewards"] == dict.fromkeys(DIRECTIONS) and all(rows[3]["rewards"].values())
    told = json.loads((tmp_path / training.HISTORY).read_text())
    assert told["rows"] == rows and told["over"] is True and told["method"] == "dual"
    assert Words.load(tmp_path / training.WORDS) == words and Course.load(tmp_path / training.COURSE) == HELD
    again = labels_pair(seed=1)
    again.load(tmp_path / training.MODEL)
    assert same_bits(state_of(again), state_of(pair)) and not pair.training
    assert len(list((tmp_path / training.STATE).iterdir())) == training.KEEP


def test_samples_are_kept_with_their_rewards(tmp_path: Path) -> None:
    pair, rows = trained(tmp_path)
    data, alpha = labels_data(), COURSE.reward.alpha
    x, y = (side[:2] for side in data.heldout)  # type: ignore[index]
    found = rows[-1]["translations"]
    assert [one["direction"] for one in found] == ["forward"] * 2 + ["backward"] * 2
    assert [one["source"] for one in found] == [*x.tolist(), *y.tolist()]
    assert [one["output"] for one in found] == [one["reference"] for one in found] == [*y.tolist(), *x.tolist()]
    r1, r2 = pair.prior_y.log_prob(y), pair.backward_model.log_prob(x, y).detach()
    assert [one["r2"] for one in found[:2]] == pytest.approx(r2.tolist())
    assert [one["r"] for one in found[:2]] == pytest.approx((alpha * r1 + (1 - alpha) * r2).tolist())


@pytest.mark.parametrize("method", ["supervised", "back_translation"])
def test_other_methods_have_no_rewards(method: str, tmp_path: Path) -> None:
    _, rows = trained(tmp_path, replace(COURSE, method=method))
    assert all(row["rewards"] == dict.fromkeys(DIRECTIONS) for row in rows)
    assert rows[-1]["phase"] == method and rows[-1]["exact_forward"] == rows[-1]["exact_backward"] == 1
    assert rows[-1]["labelled_share"] == (1.0 if method == "supervised" else pytest.approx(0.4))


def test_the_methods_differ_behind_the_warm_up_only(tmp_path: Path) -> None:
    found = {name: trained(tmp_path / name, replace(COURSE, method=name)) for name in ("dual", "supervised")}
    a, b = (rows for _, rows in found.values())
    same = ("forward", "backward", "gap")
    assert [[row[name] for name in same] for row in a[:3]] == [[row[name] for name in same] for row in b[:3]]
    assert a[-1]["forward"] != b[-1]["forward"]


def test_the_constraint_is_off_in_the_warm_up(tmp_path: Path) -> None:
    warm, held = replace(COURSE, steps=0), Constraint(0.5, 0.5)
    plain, _ = trained(tmp_path / "0", warm)
    with_it, _ = trained(tmp_path / "1", replace(warm, constraint=held))
    assert same_bits(state_of(plain), state_of(with_it))
    both = [trained(tmp_path / f"2{c.per}{c.forward}", replace(COURSE, constraint=c))[0] for c in (Constraint(), held)]
    assert not same_bits(state_of(both[0]), state_of(both[1]))


class Spy:
    """In place of a method: remembers what it is given."""

    def __init__(self, method: Any) -> None:
        self.method, self.calls = method, []  # type: Any, list[tuple[str, int]]

    def learn(self, s: Tensor, direction: Any, generator: Any) -> Any:
        self.calls.append((direction.name, len(s)))
        return self.method.learn(s, direction, generator)


@pytest.mark.parametrize("sides", ["xy", "x", "y"])
def test_directions_take_turns_where_both_have_samples(
    sides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(Dual(Reward()))
    monkeypatch.setattr(training, "method_of", lambda course: spy)
    data = labels_data()
    trained(tmp_path, data=replace(data, **{side: None for side in "xy" if side not in sides}))
    turn = [DIRECTIONS["xy".index(side)] for side in sides]
    assert [name for name, _ in spy.calls] == (turn * 12)[:12]
    assert {size for _, size in spy.calls} == {6}


def test_back_translation_teaches_the_opposite_model_alone() -> None:
    pair = labels_pair()
    found = BackTranslation().learn(draw(6, 1), pair.direction("backward"), None)  # of y
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert found.rewards is None
    there, back = (next(model.parameters()).grad for model in pair.models)
    assert there is not None and bool(there.any()) and back is None
    y = draw(6, 1)
    best = pair.backward_model.beam(y, 1)[0][:, 0]
    assert torch.equal(found.loss, -pair.forward_model.log_prob(y, best).mean())


def test_the_labelled_share_goes_in_a_straight_line() -> None:
    course = Course(warm=10, steps=5, mix=Mix(labelled_from=0.9, labelled_to=0.1))
    assert [course.labelled_share(step) for step in (0, 9)] == [1.0, 1.0]
    assert [course.labelled_share(step) for step in range(10, 15)] == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1])
    assert Course(warm=10, steps=5, method="supervised").labelled_share(12) == 1.0


def test_every_phase_and_direction_has_its_rate(tmp_path: Path) -> None:
    course = Course(warm=100, steps=100, rates=Rates(1.0, 0.1, 0.01))
    for name, highest in (("forward", 0.1), ("backward", 0.01)):
        assert max(rate(course, name, step) for step in range(100)) == pytest.approx(1.0, rel=0.01)
        assert max(rate(course, name, step) for step in range(100, 200)) == pytest.approx(highest, rel=0.01)
        assert rate(course, name, 199) < 0.06 * highest
    pair = labels_pair()
    groups = make_optimizer(pair, course).param_groups
    assert [group["params"] for group in groups] == [list(model.parameters()) for model in pair.models]
    _, rows = trained(tmp_path, replace(COURSE, rates=Rates(0.5, 0.3, 0.1)))
    assert rows[3]["rates"][0] == pytest.approx(3 * rows[3]["rates"][1])


# -- held-out pairs ---------------------------------------------------------------------------------


def test_sums_over_held_out_pairs_are_those_of_a_loop() -> None:
    pair, data = labels_pair(), labels_data()
    heldout = pairs_of(data.heldout, "held-out", 1)
    x, y = data.heldout  # type: ignore[misc]
    parts = [evaluation.look(pair, heldout, Looks(batch=4), (k, 3)) for k in range(3)]
    whole = evaluation.look(pair, heldout, Looks())
    assert torch.allclose(torch.stack(parts).sum(0), whole)
    row = evaluation.row_of(7, whole, torch.tensor([[2.0, -4, -6, -8], [0, 0, 0, 0]]))
    distance = gap(x, y, pair)
    assert row["gap"] == pytest.approx(float(distance.abs().mean()))
    assert row["gap_rms"] == pytest.approx(float((distance**2).mean().sqrt()))
    assert row["forward"] == pytest.approx(float(pair.forward_model.log_prob(y, x).detach().mean()))
    assert row["prior_x"] == pytest.approx(float(pair.prior_x.log_prob(x).mean()))
    best = pair.backward_model.distribution(y).argmax(1)  # type: ignore[attr-defined]
    assert row["exact_backward"] == pytest.approx(float((best == x).double().mean()))
    assert row["rewards"] == {"forward": {"r1": -2.0, "r2": -3.0, "r": -4.0}, "backward": None}


def test_a_side_that_is_neither_sequence_nor_label_has_no_right_outputs() -> None:
    pair = features_pair()
    x = torch.randn(6, 2)
    heldout = pairs_of((x, draw(6, 1)), "held-out", 1)
    row = evaluation.row_of(0, evaluation.look(pair, heldout, Looks()), torch.zeros(2, 4))
    assert row["exact_backward"] is None and row["exact_forward"] is not None
    found = evaluation.translations(pair, heldout, Looks(samples=9), 0.5)
    assert [one["direction"] for one in found] == ["forward"] * 6 and found[0]["source"] == "2 numbers"
    json.dumps(found)


class Gaussian(nn.Module):
    """Numbers [B, 2] around nothing, or around what a label has: a prior and a model of features."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Embedding(LABELS, 2)

    def log_prob(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mean = self.mean(y) if y is not None else torch.zeros(2)
        return torch.distributions.Normal(mean, 1.0).log_prob(x).sum(1)

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        raise AssertionError("nobody asks for it")

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        raise AssertionError("nobody asks for it")


def features_pair() -> Pair:
    """Features on one side, labels on the other."""
    return Pair(Classifier(nn.Linear(2, LABELS), LABELS), Gaussian(), Gaussian(), LabelPrior(LABELS))


# -- the warm start ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dual", "back_translation"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_pair_that_is_not_warm_is_refused_with_both_numbers(method: str, workers: int, tmp_path: Path) -> None:
    course = replace(COURSE, warm=0, method=method)
    row = evaluation.row_of(
        0, evaluation.look(labels_pair(), pairs_of(labels_data().heldout, "", 1), Looks()), torch.zeros(2, 4)
    )
    low = [name for name, prior in (("forward", "prior_y"), ("backward", "prior_x")) if row[name] <= row[prior]]
    assert low
    with pytest.raises(UnsupportedError, match="more warm steps") as caught:
        simulate(lambda: trained(tmp_path, course), workers)
    for name, prior in (("forward", "prior_y"), ("backward", "prior_x")):
        assert (f"the {name} model" in str(caught.value)) == (name in low)
        assert (f"{row[name]:.4g}" in str(caught.value)) == (name in low)
        assert name not in low or f"{row[prior]:.4g}" in str(caught.value)


def test_a_pair_that_is_warm_already_needs_no_warm_up(tmp_path: Path) -> None:
    pair, rows = trained(tmp_path / "0", replace(COURSE, steps=0))
    more = train(pair, labels_data(), replace(COURSE, warm=0), tmp_path / "1")
    assert more[0]["forward"] == pytest.approx(rows[-1]["forward"]) and more[-1]["forward"] > rows[-1]["forward"]
    _, rows = trained(tmp_path / "2", replace(COURSE, warm=0, method="supervised"))  # which needs none at all
    assert rows[-1]["forward"] > rows[0]["forward"]


# -- states to go on from ---------------------------------------------------------------------------


class Killed(Exception):
    """In place of a killed process."""


class Killer:
    """Dies behind a step, or at an evaluation."""

    def __init__(self, step: int = -1, row: int = -1) -> None:
        self.step, self.at = step, row

    def doing(self, what: str, done: float, total: float, note: str = "") -> None:
        if done == self.step:
            raise Killed

    def row(self, row: dict[str, Any]) -> None:
        if row["step"] == self.at:
            raise Killed

    def say(self, text: str) -> None:
        pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, list[dict[str, Any]]]:
    """A training that nobody killed."""
    return trained(tmp_path_factory.mktemp("whole"), replace(HELD, save_every=99))


@pytest.mark.parametrize("killer", [{"step": 3}, {"step": 7}, {"row": 12}, {"step": 14}, {"row": 24}], ids=str)
def test_a_training_that_was_killed_goes_on_with_the_same_bits(
    killer: dict[str, int], whole: tuple[Pair, list[dict[str, Any]]], tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, replace(HELD, save_every=5), show=Killer(**killer))
    assert has_state(tmp_path) == (max(killer.values()) > 5)
    pair, rows = trained(tmp_path, replace(HELD, save_every=5))
    assert same_bits(state_of(pair), state_of(whole[0])) and untimed(rows) == untimed(whole[1])


def test_the_samples_and_dropout_of_sequences_go_on_too(tmp_path: Path) -> None:
    course = replace(COURSE, warm=3, steps=4, save_every=5, rates=Rates(0.02, 0.02, 0.02))

    def go(folder: Path, **more: Any) -> tuple[Pair, list[dict[str, Any]]]:
        pair = words_pair()
        return pair, train(pair, words_data(), course, folder, **more)

    no_check: Callable[[Any, int], None] = lambda row, warm: None  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "check_warm", no_check)
        whole, history = go(tmp_path / "0")
        with pytest.raises(Killed):
            go(tmp_path / "1", show=Killer(step=6))
        pair, rows = go(tmp_path / "1")
    assert same_bits(state_of(pair), state_of(whole)) and untimed(rows) == untimed(history)
    assert rows[-1]["translations"][0]["reference"] == rows[-1]["translations"][0]["source"][::-1]


def test_a_finished_training_is_left_as_it_is(tmp_path: Path) -> None:
    first, rows = trained(tmp_path)
    again, same = trained(tmp_path)
    assert same == rows and same_bits(state_of(first), state_of(again))


def test_another_course_is_refused_by_name_unless_it_begins_anew(tmp_path: Path) -> None:
    trained(tmp_path)
    other = replace(HELD, mix=replace(HELD.mix, labelled_to=0.2), seed=3)
    with pytest.raises(CheckpointError, match=r"mix.labelled_to is 0.2 now and was 0.4; seed is 3 now and was 0"):
        trained(tmp_path, other)
    Words(("of another",)).save(tmp_path / training.WORDS)
    _, rows = trained(tmp_path, other, resume=False)
    assert (
        len(rows) == 5 and not (tmp_path / training.WORDS).exists() and Course.load(tmp_path / training.COURSE) == other
    )
    (tmp_path / training.COURSE).write_text("{}")
    with pytest.raises(CheckpointError, match="cannot read the course"):
        trained(tmp_path)


def test_a_course_is_plain_json(tmp_path: Path) -> None:
    course = replace(COURSE, reward=Reward(alpha=0.1, samples=3), constraint=Constraint(0.5, 5.0, "x"))
    course.save(tmp_path / "course.json")
    assert Course.load(tmp_path / "course.json") == course and asdict(course)["reward"]["samples"] == 3


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda: Course(method="magic"), "method is one of dual, back_translation, supervised; got 'magic'"),
        (lambda: Course(warm=0, steps=0), "together at least 1"),
        (lambda: Course(clip=0), "clip is above 0"),
        (lambda: Mix(labelled=0), "labelled is at least 1"),
        (lambda: Mix(labelled_to=1.5), "share between 0 and 1, got 1.5"),
        (lambda: Constraint(forward=-1), "forward is 0 or more, got -1"),
        (lambda: Constraint(per="token"), "per row, x or y; got 'token'"),
        (lambda: Rates(warm=0), "the rate warm is above 0"),
        (lambda: Looks(every=0), "every is at least 1"),
        (lambda: Looks(samples=-1), "samples is 0 or more"),
        (lambda: PriorCourse(steps=0), "steps and batch are at least 1"),
        (lambda: PriorCourse(rate=0), "rate and clip are above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: Callable[[], Any], what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        wrong()


# -- data -------------------------------------------------------------------------------------------


class Ragged(Dataset[Any]):
    """Pairs of sequences, each as long as it is."""

    def __init__(self, rows: list[tuple[list[int], list[int]]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> Any:
        return tuple(torch.tensor(side, dtype=torch.int64) for side in self.rows[k])


class Side(Dataset[Tensor]):
    """Sequences of one side."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> Tensor:
        return self.rows[k]


def test_batches_are_as_wide_as_their_longest_sequence() -> None:
    data = Ragged([([1, 2], [0]), ([2], []), ([0, 1, 1], [2, 2])])
    x, y = collate([data[k] for k in range(3)])
    assert x.tolist() == [[1, 2, PADDING], [2, PADDING, PADDING], [0, 1, 1]]
    assert y.tolist() == [[0, PADDING], [PADDING, PADDING], [2, 2]]
    wide = torch.full((2, 9), PADDING)
    wide[0, :2] = torch.tensor([1, 2])
    assert collate(list(wide)).tolist() == [[1, 2], [PADDING, PADDING]]
    assert collate([torch.tensor(3), torch.tensor(1)]).tolist() == [3, 1]
    assert collate([torch.zeros(2, 3)] * 4).shape == (4, 2, 3)


def test_data_sets_serve_as_well_as_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "check_warm", lambda row, warm: None)
    rows = [([k % 3, (k + 1) % 3][: 1 + k % 2], [k % 3]) for k in range(12)]
    both = Side(sequences(5, 1))
    data = Data(Ragged(rows), Ragged(rows[:3]), both, both)  # one object for both sides
    pair = words_pair()
    found = train(pair, data, replace(COURSE, warm=1, steps=2), tmp_path)
    assert found[-1]["step"] == 3 and len(found[-1]["translations"]) == 4


def test_data_that_cannot_be_are_refused(tmp_path: Path) -> None:
    data = labels_data()
    with pytest.raises(DataError, match="none of x nor of y"):
        trained(tmp_path, data=replace(data, x=None, y=None))
    with pytest.raises(DataError, match="40 samples of x and 3 of y"):
        trained(tmp_path, data=replace(data, labelled=(draw(40, 1), draw(3, 1))))
    with pytest.raises(DataError, match="held-out part has 0 samples"):
        trained(tmp_path, data=replace(data, heldout=(draw(0, 1), draw(0, 1))))
    with pytest.raises(DataError, match="unlabelled part of x has 2 samples, and at least 3"):
        simulate(lambda: trained(tmp_path, data=replace(data, x=draw(2, 1))), 3)
    assert trained(tmp_path, replace(COURSE, method="supervised"), data=replace(data, x=None, y=None))


# -- workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=4)", "asgd"])
def test_workers_end_with_one_pair_and_one_history(rule: str, tmp_path: Path) -> None:
    def program() -> Any:
        pair, rows = trained(tmp_path, rule=rule)
        return state_of(pair), untimed(rows)

    (state, rows), *others = simulate(program, 3)
    assert [row["step"] for row in rows] == [0, 8, 12, 16, 24]
    assert rows[-1]["exact_forward"] == rows[-1]["exact_backward"] == 1 and rows[0]["forward"] < rows[-1]["forward"]
    for other, its_rows in others:
        assert same_bits(other, state)
        same = [{**row, "translations": [], "rates": []} for row in rows]
        assert [{**row, "translations": [], "rates": []} for row in its_rows] == same
    assert not same_bits(state, state_of(labels_pair()))


def test_one_worker_and_several_read_the_same_held_out_pairs(tmp_path: Path) -> None:
    alone = trained(tmp_path / "1")[1][0]
    several = simulate(lambda: trained(tmp_path / "3", rule="sync")[1][0], 3)[0]
    for name in ("forward", "backward", "prior_x", "gap", "gap_rms", "exact_forward"):
        assert several[name] == pytest.approx(alone[name])
    assert several["translations"] == alone["translations"]


@pytest.mark.parametrize("rule", ["bmuf(period=4)", "asgd"])
@pytest.mark.parametrize("then", [2, 3])
def test_what_two_workers_began_others_end(rule: str, then: int, tmp_path: Path) -> None:
    def program(workers: int, **more: Any) -> list[Any]:
        return simulate(lambda: trained(tmp_path, rule=rule, **more), workers)

    with pytest.raises(Killed):
        program(2, show=Killer(step=18))
    found = program(then)
    assert [row["step"] for row in found[0][1]] == [0, 8, 12, 16, 24] and found[0][1][-1]["exact_forward"] == 1
    assert all(same_bits(state_of(pair), state_of(found[0][0])) for pair, _ in found)


def test_workers_draw_each_their_own_samples(tmp_path: Path) -> None:
    def program() -> Any:
        pair = labels_pair()
        course = replace(COURSE, steps=0)
        it = training._Training(pair, labels_data(), course, tmp_path, "sync", None, training.Silent())
        with it.run:
            return torch.rand(3, generator=it.position.generator).tolist()

    first, second = simulate(program, 2)
    assert first != second


def test_priors_are_those_of_worker_0(tmp_path: Path) -> None:
    mine = iter(range(2))

    def program() -> Any:
        torch.manual_seed(5)
        pair = words_pair()
        if next(mine):
            nn.init.zeros_(next(pair.priors[0].parameters()))
        train(pair, words_data(), replace(COURSE, warm=1, steps=0), tmp_path, rule="sync")
        return [state_of(prior) for prior in pair.priors]

    first, second = simulate(program, 2)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert same_bits(first[0], state_of(words_pair().priors[0]))


def test_a_prior_is_trained_on_one_side() -> None:
    def program() -> Any:
        prior = words_pair().priors[0].requires_grad_(True)
        x = sequences(40, 1)
        before = float(prior.log_prob(x).detach().mean())  # type: ignore[operator]
        last = train_prior(prior, x, PriorCourse(steps=8, batch=8, rate=0.05), rule="bmuf(period=4)")  # type: ignore[arg-type]
        return before, last, float(prior.log_prob(x).mean()), state_of(prior), prior  # type: ignore[operator]

    first, second = simulate(program, 2)
    before, last, after, state, prior = first
    assert before < after and before < last and same_bits(state, second[3])
    assert not prior.training and not any(p.requires_grad for p in prior.parameters())
    with pytest.raises(UnsupportedError, match="LabelPrior has no parameters that could be trained"):
        train_prior(LabelPrior(3), draw(9, 1))


@pytest.mark.processes
def test_real_processes_train_one_pair(tmp_path: Path) -> None:
    def place(rank: int) -> tuple[list[str], dict[str, str]]:
        return [sys.executable, "-m", "tests.dual.programs"], {}

    with Launch("train", 2, tmp_path, place=place) as launch:
        ended = launch.wait()
        assert all(one.code == 0 for one in ended.values()), launch.said()
    one, other = (json.loads(ended[rank].out) for rank in range(2))
    assert one == other and one["exact"] == 1.0
    history = json.loads((tmp_path / "out" / training.HISTORY).read_text())
    assert history["workers"] == 2 and history["over"] and history["bytes_sent"] > 0
