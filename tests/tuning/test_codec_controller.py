# SPDX-License-Identifier: Apache-2.0
"""The codec of blocks in elastic runs, from times made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.rules.recipes import rule_from_text
from paceline.rules.schedule import Paced
from paceline.tuning.period_controller import FIRST, CodecController, NoTimer
from paceline.tuning.tunables import Tunables

BYTES = {"dense": 400, "bf16": 200, "int8": 100, "e3m0": 50}
PACED = Paced()
"""Periods of 4 to 64, at 2 %: 1 s of exchanging wants a period of 4 with steps of 12.25 s."""
STEP_S = 49 / 4


def look(controller: CodecController, exchange_s: float) -> dict[str, Any] | None:
    """What changes after an exchange of so many seconds."""
    found = controller.agree([[True, exchange_s, STEP_S]] * 2, PACED, 8)
    return None if found is None else found[0]


@pytest.mark.parametrize(
    ("exchange_s", "codec", "period"),
    [
        (1.0, "dense", 4),
        (1.2, "dense", 6),  # nearly
        (1.3, "bf16", 4),
        (2.6, "int8", 4),
        (8.0, "int8", 8),
        (12.0, "e3m0", 6),
        (1000.0, "e3m0", 64),
    ],
)
def test_the_mildest_codec_whose_periods_suffice(exchange_s: float, codec: str, period: int) -> None:
    controller = CodecController(NoTimer(), BYTES)
    changes = look(controller, exchange_s) or {}
    assert controller.codec == codec == changes.get("codec", "dense")
    assert changes.get("period", 4) == period


def test_a_codec_is_left_only_where_it_clearly_does_not_fit() -> None:
    """bf16 serves dense exchanges of 1 to 2 s, that is its own of 0.5 to 1; a quarter more or less changes nothing."""
    controller = CodecController(NoTimer(), BYTES)
    assert look(controller, 1.6) == {"codec": "bf16", "period": 4}
    for seconds in (0.8, 0.5, 1.0, 0.45, 1.2):
        controller._seen = {}
        look(controller, seconds)
        assert controller.codec == "bf16"
    controller._seen = {}
    assert look(controller, 1.3) == {"codec": "int8", "period": 4}
    controller.renew()
    assert look(controller, 0.1) == {"codec": "dense", "period": 4}


def test_it_looks_again_soon_after_the_members_change_and_after_a_resume() -> None:
    first, second = CodecController(NoTimer(), BYTES), CodecController(NoTimer(), BYTES)
    look(first, 100.0)
    second.load(first.state())
    assert second.state() == first.state() and second.codec == "e3m0" and first.state()["next"] == 8 + FIRST
    second.renew()
    assert second.state()["next"] == 0 and second.state()["seen"] == {}


def test_the_codec_of_the_rule_changes_goes_into_checkpoints_and_is_no_setting() -> None:
    rule = rule_from_text("auto")
    tunables, other = Tunables([], rule, 2, codecs=True), Tunables([], rule, 2, codecs=True)
    tunables.apply({"codec": "int8", "period": 8})
    assert tunables.show({"codec": 0, "period": 0}) == {"codec": "int8", "period": 8}
    other.load(tunables.state())
    assert other.rule.codec == tunables.rule.codec != rule.codec and other.rule.schedule.period == 8
    assert "codec" not in tunables.numbers()
    with pytest.raises(Exception, match="'codec' cannot be tuned"):
        tunables.check({"codec": "int8"})
    undo = tunables.snapshot({"period": 4})
    tunables.apply({"codec": "bf16"})
    tunables.restore(undo)
    assert tunables.show(["codec"]) == {"codec": "bf16"}
