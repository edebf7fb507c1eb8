# SPDX-License-Identifier: Apache-2.0
"""Each quantiser against its equation, written out number by number."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from paceline.errors import RuleError
from paceline.rules.codec import E3M0, Half, Int8, Layout, OneBit, Sign, State, TwoSided
from tests.rules.codec.lockstep import exchange


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def two_means(v: list[float]) -> list[float]:
    """1-bit."""
    ones, zeros = [m for m in v if m >= 0], [m for m in v if m < 0]
    high = math.fsum(ones) / len(ones) if ones else 0.0
    low = math.fsum(zeros) / len(zeros) if zeros else 0.0
    return [high if m >= 0 else low for m in v]


def one_scale(v: list[float]) -> list[float]:
    """Sign."""
    scale = math.fsum(abs(m) for m in v) / len(v)
    return [scale if m >= 0 else -scale for m in v]


def of_127(v: list[float]) -> list[float]:
    """Int8."""
    scale = float32(max(abs(m) for m in v) / 127)
    return [round(float32(m / scale)) * scale if scale else 0.0 for m in v]


def nearest_power(value: float) -> int:
    """The exponent of the power of two nearest to a positive number; the upper one where both are as near."""
    mantissa, exponent = math.frexp(value)  # mantissa in [0.5, 1)
    return exponent if mantissa >= 0.75 else exponent - 1


def seven_powers(v: list[float]) -> list[float]:
    """E3M0."""
    largest = nearest_power(max(abs(m) for m in v))
    found = []
    for m in v:
        power = nearest_power(abs(m)) if m else -999
        found.append(math.copysign(2.0**power, m) if power >= largest - 6 else 0.0)
    return found


LAYOUT = Layout.of([(3, 130), (45, 3), (9,)])
MIDDLE = 320  # where its second stripe of two begins: ceil(534 / 128) * 64
COLUMNS = [(0, 130), (130, 260), (260, MIDDLE), (MIDDLE, 390), (390, 456), (456, 525), (525, 534)]
BLOCKS = [(0, 256), (256, 260), (260, MIDDLE), (MIDDLE, 390), (390, 525), (525, 534)]
QUANTISERS = {
    "one_bit": (OneBit(), two_means, COLUMNS),
    "sign": (Sign(), one_scale, COLUMNS),
    "int8": (Int8(), of_127, BLOCKS),
    "e3m0": (E3M0(), seven_powers, BLOCKS),
}


@pytest.mark.parametrize("name", QUANTISERS)
def test_five_exchanges_of_both_sides_number_by_number(name: str) -> None:
    codec, equation, groups = QUANTISERS[name]
    workers = 2
    states: list[State] = [{} for _ in range(workers)]
    residuals = [[0.0] * LAYOUT.numel for _ in range(workers)]
    owner = [0.0] * LAYOUT.numel

    def quantised(v: list[float]) -> list[float]:
        return [m for begin, end in groups for m in equation(v[begin:end])]

    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        xs = [torch.randn(LAYOUT.numel, generator=generator) for _ in range(workers)]
        outcome = exchange(codec, xs, LAYOUT, states)
        states = outcome.states
        total = list(owner)
        for i, x in enumerate(xs):
            v = (x.double() + torch.tensor(residuals[i], dtype=torch.float64)).tolist()
            q = quantised(v)
            residuals[i] = [a - b for a, b in zip(v, q, strict=True)]
            total = [a + b for a, b in zip(total, q, strict=True)]
        answer = quantised(total)
        owner = [a - b for a, b in zip(total, answer, strict=True)]
        close(outcome.totals[1], answer)
        close(torch.cat([state["owner"] for state in states]), owner)
        for i in range(workers):
            close(states[i]["residual"], residuals[i])


def close(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=2e-5)


def encoded(codec: TwoSided, x: Tensor, layout: Layout) -> tuple[bytes, Tensor]:
    """The payload, and what a peer makes of it."""
    payload, total = torch.zeros(codec.payload_bytes(layout), dtype=torch.uint8), torch.zeros_like(x)
    codec.encode(x.clone(), layout, payload, None)
    codec.decode(payload, layout, total)
    return bytes(payload.tolist()), total


def test_one_bit_by_hand() -> None:
    payload, total = encoded(OneBit(), torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, 0.0, 0.0, 0.0, -6.0]), Layout.vector(9))
    assert total.tolist() == pytest.approx([4 / 6, -4, 4 / 6, -4, 4 / 6, 4 / 6, 4 / 6, 4 / 6, -4])
    assert payload == struct.pack("ff", 4 / 6, -4.0) + bytes([0b10101111, 0])


def test_sign_by_hand() -> None:
    payload, total = encoded(Sign(), torch.tensor([1.0, -2.0, 3.0]), Layout.vector(3))
    assert total.tolist() == [2.0, -2.0, 2.0]
    assert payload == struct.pack("f", 2.0) + bytes([0b10100000])


def test_int8_by_hand() -> None:
    payload, total = encoded(Int8(), torch.tensor([127.0, -254.0, 1.0, 3.0]), Layout.vector(4))
    assert total.tolist() == [128.0, -254.0, 0.0, 4.0]  # 63.5, 0.5 and 1.5 steps: ties to even
    assert payload == struct.pack("fbbbb", 2.0, 64, -127, 0, 2)


def test_e3m0_by_hand() -> None:
    x = torch.tensor([1.0, -0.75, 0.74, 0.0, 0.0118, -0.0116, 1.4])
    payload, total = encoded(E3M0(), x, Layout.vector(7))
    assert total.tolist() == [1.0, -1.0, 0.5, 0.0, 2.0**-6, 0.0, 1.0]
    assert payload == struct.pack("f", 1.0) + bytes([0xF7, 0x06, 0x81, 0x07])


def test_float16_clamps_and_the_rest_follows() -> None:
    layout, state = Layout.vector(1), [{}]
    sent = 0.0
    for given in (100_000.0, 0.0, 0.0):
        outcome = exchange(Half("fp16"), [torch.tensor([given])], layout, state)
        state, sent = outcome.states, sent + float(outcome.totals[0])
        assert float(outcome.totals[0]) <= 65_504
    assert sent + float(state[0]["owner"]) + float(state[0]["residual"]) == 100_000


@pytest.mark.parametrize("build", [OneBit, Sign, Int8, E3M0, Half])
def test_feedback_must_be_true_or_false(build: type) -> None:
    with pytest.raises(RuleError, match="feedback must be True or False, got 1"):
        build(feedback=1)


@pytest.mark.parametrize("codec", [OneBit(), Sign(), Int8(), E3M0(), Half("bf16"), Half("fp16")], ids=str)
def test_a_sender_takes_off_exactly_what_its_peers_read(codec: TwoSided) -> None:
    x = torch.randn(7, 65) * 10.0 ** torch.arange(-3, 4).view(7, 1)
    x[2], x[3, 5] = 0, -0.0
    codes, levels = torch.zeros(7, codec.code_bytes(65), dtype=torch.uint8), torch.zeros(7, codec.levels)
    assert torch.equal(codec.write(x, codes, levels), codec.read(codes, levels, 65))
