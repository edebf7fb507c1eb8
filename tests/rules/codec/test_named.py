# SPDX-License-Identifier: Apache-2.0
"""Codecs from text, and after a dense warm-up."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import RuleError
from paceline.rules.codec import (
    CODECS,
    E3M0,
    Codec,
    Dense,
    Half,
    Int8,
    Layout,
    LowRank,
    OneBit,
    Sign,
    TopK,
    Warmed,
    codec_from_text,
)
from tests.rules.codec.lockstep import exchange


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("dense", Dense()),
        ("bf16", Half("bf16")),
        (" fp16(feedback=False) ", Half("fp16", feedback=False)),
        ("int8()", Int8()),
        ("e3m0", E3M0()),
        ("one_bit(feedback=False)", OneBit(feedback=False)),
        ("sign", Sign()),
        ("low_rank(rank=2, min_rate=1.5)", LowRank(2, True, 1.5)),
        ("top_k(ratio=0.001, warmup=((500, 0.25), (500, 0.063)))", TopK(0.001, warmup=((500, 0.25), (500, 0.063)))),
    ],
)
def test_text_is_a_literal_call(text: str, codec: Codec) -> None:
    assert codec_from_text(text) == codec
    assert codec_from_text(text).describe(4) == codec.describe(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("onebit", r"there is no codec 'onebit'; there are dense, .*did you mean 'one_bit'\?"),
        (
            "low_rank(rang=2)",
            r"low_rank has no setting 'rang'; it has rank, feedback, min_rate \(did you mean 'rank'\?",
        ),
        ("dense(feedback=True)", "dense has no setting 'feedback'; it has none"),
        ("low_rank(2)", "the settings of .* need names, like one_bit or low_rank"),
        ("low_rank(**{})", "the settings of .* need names"),
        ("low_rank(rank=print(1))", "the value of rank in .* is not a plain number"),
        ("low_rank(rank=0)", "rank must be a whole number, at least 1, got 0"),
        ("low_rank(rank=2", "cannot read the codec"),
        ("a.b()", "cannot read the codec"),
        ("", "cannot read the codec"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        codec_from_text(text)


def test_every_codec_has_a_name() -> None:
    kinds = {type(codec_from_text(name)) for name in CODECS}
    assert kinds == {Dense, Half, Int8, E3M0, OneBit, Sign, LowRank, TopK}


def test_a_warm_up_is_dense_and_then_the_codec_from_its_own_start() -> None:
    codec = Warmed(TopK(0.01, warmup=((1, 0.5),)), 2)
    assert [codec.at(number) for number in range(4)] == [Dense(), Dense(), TopK(0.5), TopK(0.01)]
    layout = Layout.vector(100)
    assert (codec.exact, codec.operations, codec.whole) == (False, 1, False)
    assert codec.bytes_sent(layout, 3, 0) == 16
    assert "after 2 dense exchanges" in codec.describe(4)
    x = torch.randn(100)
    assert torch.equal(exchange(codec, [x], layout).totals[0], exchange(TopK(0.01), [x], layout).totals[0])


@pytest.mark.parametrize("exchanges", [-1, 1.5, True])
def test_a_warm_up_is_a_whole_number_of_exchanges(exchanges: object) -> None:
    with pytest.raises(RuleError, match=f"exchanges must be a whole number, at least 0, got {exchanges!r}"):
        Warmed(OneBit(), exchanges)  # type: ignore[arg-type]
