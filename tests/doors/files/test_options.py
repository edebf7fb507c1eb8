# SPDX-License-Identifier: Apache-2.0
"""Placeholders, parts of the data, rates and rules of closed tools."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.errors import DataError, RuleError, UnsupportedError
from paceline_plugins.files import parts, placeholders
from paceline_plugins.files.plan import Plan, check_continues, checked_rule
from tests.doors.files.plans import plan


def test_placeholders_are_filled_and_other_braces_stay() -> None:
    command = ["./tool", "--in={model}", "{part}/{parts}", "awk '{ print $1 }'", "{{part}}", "${HOME}", "{}"]
    values = {"model": "in.mdl", "part": 0, "parts": 4}
    said = ["./tool", "--in=in.mdl", "0/4", "awk '{ print $1 }'", "{part}", "${HOME}", "{}"]
    assert placeholders.filled(command, values) == said
    assert placeholders.used(command) == {"model", "part", "parts"}


@pytest.mark.parametrize(
    ("command", "data", "rate", "why"),
    [
        ("{modle} {model_out} {part}", False, False, r"no placeholder \{modle\} \(did you mean 'model'\?\)"),
        ("{model} {part}", False, False, r"needs \{model_out\}: the file that it has to write"),
        ("{model} {model_out} {list}", False, False, r"needs --data FILE for \{list\}"),
        ("{model} {model_out} {part}", True, False, r"does not use \{list\}, and --data FILE is given"),
        ("{model} {model_out} {part} {lr}", False, False, r"needs --lr RATE for \{lr\}"),
        ("{model} {model_out} {part}", False, True, r"does not use \{lr\}"),
        ("{model} {model_out} {epoch}", False, False, "all workers would train on the same data"),
    ],
)
def test_a_command_that_the_options_do_not_fit_is_refused(command: str, data: bool, rate: bool, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        placeholders.check(command.split(), data, rate)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_parts_of_an_epoch_are_all_parts(shuffle: bool) -> None:
    made = parts.Parts(12, 5, shuffle)
    orders = [[made.number(epoch, place) for place in range(12)] for epoch in range(3)]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert (orders[0] != orders[1]) == shuffle
    assert parts.Parts(12, 6, shuffle).number(0, 0) >= 0
    assert len({made.seed(epoch, part) for epoch in range(3) for part in range(12)}) == 36


def test_a_list_without_enough_lines_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "list"
    place.write_bytes(b"one\n\n  \ntwo")
    assert parts.read_list(place) == [b"one\n", b"two\n"]
    with pytest.raises(DataError, match="has 2 lines, and an epoch 3 parts"):
        parts.Parts(3, 0, True, parts.read_list(place))
    place.write_bytes(b"\n")
    with pytest.raises(DataError, match="no sample to train on"):
        parts.read_list(place)
    with pytest.raises(DataError, match="cannot be read"):
        parts.read_list(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("asgd", "does not merge models block by block"),
        ("sync", "does not merge models block by block"),
        ("bmuf(period=4)", "leave period out"),
        ("bmuf(warmup=2)", "leave warmup"),
        ("bmuf(within='host')", "leave warmup, within"),
        ("streaming_diloco", "leave warmup"),
        ("bmuf_adam", "changes the state of the optimizer"),
    ],
)
def test_a_rule_that_cannot_merge_files_is_refused(text: str, why: str) -> None:
    with pytest.raises((UnsupportedError, RuleError), match=why):
        checked_rule(text)


def test_a_plan_is_read_back_and_its_differences_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = plan()
    place = tmp_path / "plan.json"
    place.write_text(asked.text)
    assert Plan.read(place) == asked
    check_continues(dataclasses.replace(asked, epochs=9, lr=1.0, keep=7), asked)
    with pytest.raises(UnsupportedError, match="--rule, --parts differ"):
        check_continues(dataclasses.replace(asked, parts=4, rule="bmuf"), asked)
    place.write_text(asked.text.replace('"version": 1', '"version": 2'))
    with pytest.raises(DataError, match="its version is 2"):
        Plan.read(place)
