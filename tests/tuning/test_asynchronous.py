# SPDX-License-Identifier: Apache-2.0
"""Where each worker exchanges by itself, a change goes through the log directory, and each applies it by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UnsupportedError
from tests.helpers import Place, same_bits, sgd, train


@pytest.mark.parametrize("rule", ["asgd()", "asgd(period=3)", "ssp(staleness=2)", "easgd(period=3)"])
def test_every_worker_follows(rule: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": 0.01} | ({"period": 2} if "period" in rule else {})

    def hook(place: Place) -> None:
        if (place.rank, place.step) == (1, 3):
            place.extra["request"] = place.run.tune(**settings)
        place.run._context.tuner.look(now=True)
        place.extra["lr"] = place.optimizer.param_groups[0]["lr"]
        place.extra["rule"] = place.run.rule
        place.extra["streams"] = [stream._schedule for stream in place.run._engine._clients]  # type: ignore[union-attr]

    outs = train(rule, 3, optimizer=sgd, samples=96, after_step=hook, settings={"log": tmp_path})
    request = outs[1].extra["request"]
    assert request.applied and request.minibatch == 4
    for out in outs:
        assert out.extra["lr"] == 0.01 and same_bits(out.model, outs[0].model)
        period = settings.get("period", 1)
        assert out.extra["rule"].schedule.period == period
        assert all(schedule.period == period for schedule in out.extra["streams"])


@pytest.mark.parametrize("log", [True, False])
def test_a_change_that_not_all_would_hear_of_is_refused(log: bool, tmp_path: Path) -> None:
    def hook(place: Place) -> None:
        if (place.rank, place.step) == (1, 3):
            for file in tmp_path.glob("rank-002.jsonl"):
                file.rename(tmp_path / "gone")
            with pytest.raises(UnsupportedError, match="not all logs lie in" if log else "this run has none"):
                place.run.tune(lr=0.5)

    train("asgd()", 3, optimizer=sgd, after_step=hook, settings={"log": tmp_path} if log else {})


@pytest.mark.parametrize("rule", ["ssp(staleness=1)", "asgd()"])
def test_owners_step_with_the_factor(rule: str, tmp_path: Path) -> None:
    """Half the rate, from the step at which each worker saw the request, is what a program writes at these steps."""

    def hook(place: Place) -> None:
        if (place.rank, place.step) == (0, 1):
            place.run.tune(lr_factor=0.5)
        place.run._context.tuner.look(now=True)
        place.extra.setdefault("factors", []).append(dict(place.run._context.tuner.tunables.rates.factors))

    outs = train(rule, 2, optimizer=sgd, after_step=hook, settings={"log": tmp_path})
    steps = [out.extra["factors"].index({0: 0.5}) for out in outs]

    def written(place: Place) -> None:
        if place.step == steps[place.rank]:
            place.optimizer.param_groups[0]["lr"] = 0.05

    want, untouched = train(rule, 2, optimizer=sgd, after_step=written), train(rule, 2, optimizer=sgd)
    assert same_bits(outs[0].model, want[0].model) and not same_bits(outs[0].model, untouched[0].model)
