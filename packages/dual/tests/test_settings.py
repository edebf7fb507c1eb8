# SPDX-License-Identifier: Apache-2.0
"""A course: plain JSON, shares and rates over its steps; what cannot be is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from paceline import UnsupportedError
from paceline_dual.learning import Reward
from paceline_dual.priors import PriorCourse
from paceline_dual.settings import Constraint, Course, Looks, Loop, Mix, Rates
from tasks import COURSE


def test_the_labelled_share_goes_in_a_straight_line() -> None:
    course = Course(warm=10, steps=5, mix=Mix(labelled_from=0.9, labelled_to=0.1))
    assert [course.labelled_share(step) for step in (0, 9)] == [1.0, 1.0]
    assert [course.labelled_share(step) for step in range(10, 15)] == pytest.approx([0.9, 0.7, 0.5, 0.3, 0.1])
    assert Course(warm=10, steps=5, method="supervised").labelled_share(12) == 1.0


def test_a_saved_course_is_flat_json(tmp_path: Path) -> None:
    COURSE.save(tmp_path / "course.json")
    saved = json.loads((tmp_path / "course.json").read_text())
    settings = "warm steps method mix constraint reward rates clip looks save_every seed"
    assert list(saved) == ["format", *settings.split()]
    assert saved["clip"] == 5.0 and saved["save_every"] == 5 and saved["looks"]["every"] == 8


def test_a_course_is_plain_json(tmp_path: Path) -> None:
    course = replace(COURSE, reward=Reward(alpha=0.1, samples=3), constraint=Constraint(0.5, 5.0, "x"))
    course.save(tmp_path / "course.json")
    assert Course.load(tmp_path / "course.json") == course and asdict(course)["reward"]["samples"] == 3


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (
            lambda: Course(method="magic"),
            "method is one of dual, back_translation, iterative_back_translation, supervised; got 'magic'",
        ),
        (lambda: Course(warm=0, steps=0), "together at least 1"),
        (lambda: Loop(clip=0), "clip is above 0"),
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
