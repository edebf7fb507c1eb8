# SPDX-License-Identifier: Apache-2.0
"""No door falls over whatever is thrown at it, and a header is one or a clear error."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.communication.sockets.frames import HEADER_BYTES, MAGIC, FrameHeader, read_note
from paceline.core.state_tree import build
from paceline.errors import CheckpointError, MismatchError, RuleError
from paceline.rules.recipes import rule_from_text
from tests.security.doors import DOORS
from tests.security.fuzz import fuzz, good

FRAMES = 2000
LIMIT = 1 << 20
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TAGS = ["tensor", "array", "float", "bytes", "dtype", "device", "tuple", "dict", "counter", "none of these"]


@pytest.mark.parametrize("door", DOORS)
def test_a_door_stands_it(door: str) -> None:
    found = fuzz(door, FRAMES // len(DOORS))
    assert good(found), found


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=HEADER_BYTES - len(MAGIC), max_size=HEADER_BYTES - len(MAGIC)))
def test_a_header_is_one_or_a_clear_error(data: bytes) -> None:
    try:
        header = FrameHeader.read(MAGIC + data, LIMIT)
    except MismatchError as error:
        assert str(error)
        return
    assert header.body_bytes <= LIMIT and header.pack() == MAGIC + data


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_note_is_json_or_a_clear_error(data: bytes) -> None:
    try:
        read_note(data)
    except MismatchError as error:
        assert "is not JSON" in str(error)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"9" * 100_000, b"\xff\xfe", b'"\xff"'])
def test_notes_that_break_parsers(data: bytes) -> None:
    with pytest.raises(MismatchError, match="is not JSON"):
        read_note(data)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TAGS), JSON)
def test_the_state_of_a_checkpoint_is_one_or_a_clear_error(tag: str, inner: object) -> None:
    try:
        build({f"paceline.{tag}": inner}, {})
    except CheckpointError as error:
        assert "the checkpoint " in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000,
        "bmuf(period=" + "-" * 100_000 + "1)",
        "bmuf(period={[]: 1})",
        "bmuf(\0)",
        "bmuf(period=9**9**9)",
        "\ud800",
    ],
)
def test_rules_that_break_parsers(text: str) -> None:
    with pytest.raises(RuleError):
        rule_from_text(text)
