# SPDX-License-Identifier: Apache-2.0
"""Training on several workers: one pair, one history, the same priors, states that others go on from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dual_helpers import on_real_workers, same_bits, simulate, state_of
from paceline import UnsupportedError
from paceline_dual import training
from paceline_dual.classifier import LabelPrior
from paceline_dual.priors import PriorCourse, train_prior
from paceline_dual.training import train
from running import Killed, Killer, trained, untimed
from tasks import COURSE, draw, labels_data, labels_pair, sequences, words_data, words_pair


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
    one, other = on_real_workers("pair_program.py", 2, tmp_path)
    assert one == other and one["exact"] == 1.0
    history = json.loads((tmp_path / "out" / training.HISTORY).read_text())
    assert history["workers"] == 2 and history["over"] and history["bytes_sent"] > 0
