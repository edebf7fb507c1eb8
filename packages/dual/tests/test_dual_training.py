# SPDX-License-Identifier: Apache-2.0
"""Training of a pair: the course's two phases, every method, the warm start, states to go on from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dual_helpers import same_bits, simulate, state_of
from paceline import CheckpointError, UnsupportedError
from paceline_dual import evaluation, training
from paceline_dual.batches import pairs_of
from paceline_dual.learning import Reward
from paceline_dual.methods import BackTranslation, Dual, IterativeBackTranslation
from paceline_dual.pair import DIRECTIONS, Pair
from paceline_dual.rates import make_optimizer, rate
from paceline_dual.settings import Constraint, Course, Looks, Loop, Rates
from paceline_dual.training import has_state, train
from paceline_dual.words import Words
from running import Killed, Killer, trained, untimed
from tasks import COURSE, HELD, LOOP, draw, labels_data, labels_pair, words_data, words_pair


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


@pytest.mark.parametrize("method", ["supervised", "back_translation", "iterative_back_translation"])
def test_other_methods_have_no_rewards(method: str, tmp_path: Path) -> None:
    _, rows = trained(tmp_path, replace(COURSE, method=method))
    assert all(row["rewards"] == dict.fromkeys(DIRECTIONS) for row in rows)
    assert rows[-1]["phase"] == method and rows[-1]["exact_forward"] == rows[-1]["exact_backward"] == 1
    assert rows[-1]["labelled_share"] == (1.0 if method == "supervised" else pytest.approx(0.4))


def test_the_methods_differ_after_the_warm_up_only(tmp_path: Path) -> None:
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
        self.begin, self.state_dict = method.begin, method.state_dict
        self.load_state_dict = method.load_state_dict

    def learn(self, s: Tensor, direction: Any, generator: Any) -> Any:
        self.calls.append((direction.name, len(s)))
        return self.method.learn(s, direction, generator)


@pytest.mark.parametrize("sides", ["xy", "x", "y"])
def test_directions_take_turns_where_both_have_samples(
    sides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(Dual(Reward()))
    monkeypatch.setattr(training, "method_of", lambda course, pair: spy)
    data = labels_data()
    trained(tmp_path, data=replace(data, **{side: None for side in "xy" if side not in sides}))
    turn = [DIRECTIONS["xy".index(side)] for side in sides]
    assert [name for name, _ in spy.calls] == (turn * 12)[:12]
    assert {size for _, size in spy.calls} == {6}


def test_back_translation_teaches_the_opposite_model_alone() -> None:
    pair = labels_pair()
    found = IterativeBackTranslation().learn(draw(6, 1), pair.direction("backward"), None)  # of y
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert found.rewards is None
    there, back = (next(model.parameters()).grad for model in pair.models)
    assert there is not None and bool(there.any()) and back is None
    y = draw(6, 1)
    best = pair.backward_model.beam(y, 1)[0][:, 0]
    assert torch.equal(found.loss, -pair.forward_model.log_prob(y, best).mean())


def test_back_translation_has_labels_of_the_models_after_the_warm_up() -> None:
    pair, y = labels_pair(), draw(6, 1)
    method, kept = BackTranslation(labels_pair()), BackTranslation(labels_pair())
    before = pair.backward_model.beam(y, 1)[0][:, 0]
    method.begin(pair)
    with torch.no_grad():
        for parameter in pair.backward_model.parameters():  # type: ignore[attr-defined]
            parameter.neg_()  # the best label becomes the worst
    kept.load_state_dict(method.state_dict())
    now = pair.backward_model.beam(y, 1)[0][:, 0]
    assert not torch.equal(before, now)
    for found in (one.learn(y, pair.direction("backward"), None).loss for one in (method, kept)):
        assert torch.equal(found, -pair.forward_model.log_prob(y, before).mean())


@pytest.mark.parametrize("policy", [0.0, 0.25])
def test_the_policy_gradient_has_a_weight_and_the_exact_one_has_none(policy: float) -> None:
    found = []
    for weight in (policy, 1.0):
        pair = labels_pair()
        direction = pair.direction("forward")
        Dual(Reward(), weight).learn(draw(6, 1), direction, torch.Generator().manual_seed(0)).loss.backward()  # type: ignore[no-untyped-call]
        found.append([next(model.parameters()).grad for model in pair.models])
    (weighed, exact), (whole, same) = found
    torch.testing.assert_close(weighed, policy * whole)
    torch.testing.assert_close(exact, same)


def test_every_phase_and_direction_has_its_rate(tmp_path: Path) -> None:
    course = Course(warm=100, steps=100, loop=Loop(Rates(1.0, 0.1, 0.01)))
    for name, highest in (("forward", 0.1), ("backward", 0.01)):
        assert max(rate(course, name, step) for step in range(100)) == pytest.approx(1.0, rel=0.01)
        assert max(rate(course, name, step) for step in range(100, 200)) == pytest.approx(highest, rel=0.01)
        assert rate(course, name, 199) < 0.06 * highest
    pair = labels_pair()
    groups = make_optimizer(pair, course).param_groups
    assert [group["params"] for group in groups] == [list(model.parameters()) for model in pair.models]
    _, rows = trained(tmp_path, replace(COURSE, loop=replace(LOOP, rates=Rates(0.5, 0.3, 0.1))))
    assert rows[3]["rates"][0] == pytest.approx(3 * rows[3]["rates"][1])


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, list[dict[str, Any]]]:
    """A training that nobody killed."""
    return trained(tmp_path_factory.mktemp("whole"), replace(HELD, loop=replace(LOOP, save_every=99)))


@pytest.mark.parametrize("killer", [{"step": 3}, {"step": 7}, {"row": 12}, {"step": 14}, {"row": 24}], ids=str)
def test_a_training_that_was_killed_goes_on_with_the_same_bits(
    killer: dict[str, int], whole: tuple[Pair, list[dict[str, Any]]], tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        trained(tmp_path, HELD, show=Killer(**killer))
    assert has_state(tmp_path) == (max(killer.values()) > 5)
    pair, rows = trained(tmp_path, HELD)
    assert same_bits(state_of(pair), state_of(whole[0])) and untimed(rows) == untimed(whole[1])


def test_the_samples_and_dropout_of_sequences_go_on_too(tmp_path: Path) -> None:
    course = replace(COURSE, warm=3, steps=4, loop=replace(LOOP, rates=Rates(0.02, 0.02, 0.02)))

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
    other = replace(HELD, mix=replace(HELD.mix, labelled_to=0.2), loop=replace(LOOP, seed=3))
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
