# SPDX-License-Identifier: Apache-2.0
"""What holds for every codec: nothing is lost, everybody has the same bits, the bytes are those of the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.rules.codec import CODECS, Codec, Dense, Layout, LowRank, State, codec_from_text
from tests.rules.codec.lockstep import exchange
from tests.tables import each_value_fast

INEXACT = [name for name in CODECS if name != "dense"]
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one": [(1,)],
    "three": [(3,)],
    "vector": [(201,)],
    "model": [(40, 30), (7,), (3, 5, 2), (150, 3), (2, 300)],
}
FLOATS = [torch.float32, torch.float64]


def inputs(layout: Layout, workers: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(layout.numel, dtype=dtype) * 10.0**rank for rank in range(workers)]


def owners(states: list[State]) -> Tensor | float:
    """What the owners hold back, shape (n,)."""
    return torch.cat([state["owner"] for state in states]) if "owner" in states[0] else 0.0


@pytest.mark.parametrize(
    ("name", "shapes", "workers", "dtype"), each_value_fast(INEXACT, list(SHAPES), [1, 2, 3, 5], FLOATS)
)
def test_totals_and_residuals_are_what_was_given(name: str, shapes: str, workers: int, dtype: torch.dtype) -> None:
    codec, layout = codec_from_text(name), Layout.of(SHAPES[shapes])
    given, sent = torch.zeros(layout.numel, dtype=torch.float64), torch.zeros(layout.numel, dtype=torch.float64)
    states: list[State] = [{} for _ in range(workers)]
    for _ in range(4):
        xs = inputs(layout, workers, dtype)
        outcome = exchange(codec, xs, layout, states)
        states = outcome.states
        given += sum(x.double() for x in xs)
        sent += outcome.totals[0].double()
        for worker, (total, state) in enumerate(zip(outcome.totals, states, strict=True)):
            assert torch.equal(total, outcome.totals[0])
            assert total.dtype == dtype and total.shape == (layout.numel,)
            assert state["residual"].data_ptr() == outcome.errors[worker].data_ptr()
            assert total.data_ptr() != outcome.errors[worker].data_ptr()
            assert all(tensor.dtype == dtype for tensor in state.values())
        assert outcome.bytes_sent == [codec.bytes_sent(layout, workers, rank) for rank in range(workers)]
        assert outcome.operations == codec.operations
    rest = sum(state["residual"].double() for state in states) + owners(states)
    bound = (3e-5 if dtype == torch.float32 else 1e-13) * 10.0 ** (workers - 1)
    assert float((given - sent - rest).abs().max()) < bound


@pytest.mark.parametrize("name", INEXACT)
def test_without_feedback_nothing_is_kept_and_the_error_stays_in_x(name: str) -> None:
    codec, layout = codec_from_text(f"{name}(feedback=False)"), Layout.of(SHAPES["model"])
    xs = inputs(layout, 3)
    outcome = exchange(codec, xs, layout)
    again = exchange(codec, xs, layout, [{name: t for name, t in s.items() if name != "q"} for s in outcome.states])
    assert torch.equal(again.totals[0], outcome.totals[0])
    assert all(set(state) <= {"q"} for state in outcome.states)
    sent = sum(x.double() - e.double() for x, e in zip(xs, outcome.errors, strict=True))
    if name in ("top_k", "low_rank"):  # other codecs quantise the sum as well
        torch.testing.assert_close(outcome.totals[0].double(), sent, rtol=1e-4, atol=1e-3)
    else:
        assert 0 < (outcome.totals[0] - sent).norm() < sent.norm()


@pytest.mark.parametrize("name", INEXACT)
def test_the_state_from_before_is_not_touched(name: str) -> None:
    codec, layout = codec_from_text(name), Layout.of(SHAPES["model"])
    before = exchange(codec, inputs(layout, 2), layout).states
    copies = [{key: tensor.clone() for key, tensor in state.items()} for state in before]
    xs = inputs(layout, 2)
    first = exchange(codec, xs, layout, before)
    assert all(torch.equal(state[key], copy[key]) for state, copy in zip(before, copies, strict=True) for key in copy)
    assert all(
        new[key].data_ptr() != old[key].data_ptr()
        for new, old in zip(first.states, before, strict=True)
        for key in old
        if old[key].numel()
    )
    assert torch.equal(exchange(codec, xs, layout, copies).totals[0], first.totals[0])  # as from a checkpoint


ZEROS = [(name, FLOATS[k % 2]) for k, name in enumerate([*INEXACT, "top_k(ratio=0.1, momentum=0.9)"])]


@pytest.mark.parametrize(("name", "dtype"), ZEROS)
def test_zeros_stay_zero(name: str, dtype: torch.dtype) -> None:
    codec, layout = codec_from_text(name), Layout.of(SHAPES["model"])
    states: list[State] = [{}, {}]
    for _ in range(3):
        outcome = exchange(codec, [torch.zeros(layout.numel, dtype=dtype)] * 2, layout, states)
        states = outcome.states
        assert not outcome.totals[0].any()
        assert not any(state[key].any() for state in states for key in state)


@pytest.mark.parametrize("name", ["one_bit", "sign", "int8", "e3m0", "bf16", "fp16", "top_k(ratio=0.4)", "low_rank"])
def test_unused_rows_stay_zero(name: str) -> None:
    codec, layout = codec_from_text(name), Layout.of([(40, 256)])
    used = torch.zeros(40, 256)
    used[::4] = 1.0
    states: list[State] = [{}, {}]
    for _ in range(3):
        outcome = exchange(codec, [torch.randn(layout.numel) * used.view(-1) for _ in range(2)], layout, states)
        states = outcome.states
        unused = outcome.totals[0][used.view(-1) == 0]
        assert float(unused.abs().max()) < (1e-4 if name == "low_rank" else 1e-38)


HARD: dict[str, Tensor] = {
    "gaussian": torch.randn(6000, generator=torch.Generator().manual_seed(1)),
    "one_hot": torch.eye(60)[17].repeat_interleave(100),
    "single": torch.zeros(6000).index_fill_(0, torch.tensor(77), -3.0),
    "constant": torch.full((6000,), -0.7),
    "huge": torch.randn(6000, generator=torch.Generator().manual_seed(2)) * 1e30,
    "tiny": torch.randn(6000, generator=torch.Generator().manual_seed(3)) * 1e-30,
    "denormal": torch.randn(6000, generator=torch.Generator().manual_seed(4)) * 1e-42,
    "mixed": 10.0 ** torch.linspace(-44, 33, 6000),
}


@pytest.mark.parametrize("name", INEXACT)
def test_the_error_is_no_larger_than_what_was_given(name: str) -> None:
    codec, layout = codec_from_text(name), Layout.of([(60, 100)])
    for kind, x in HARD.items():
        outcome = exchange(codec, [x, -0.5 * x], layout)
        assert outcome.totals[0].isfinite().all(), kind
        for given, error in zip((x, -0.5 * x), outcome.errors, strict=True):
            assert error.isfinite().all(), kind
            if not (name == "low_rank" and kind == "denormal"):  # products of denormals have no digits
                assert error.double().norm() <= given.double().norm() * (1 + 1e-6), kind


@pytest.mark.parametrize("name", [name for name in INEXACT if name != "low_rank"])  # that one sends float64
def test_beyond_float32_a_float64_number_is_clamped(name: str) -> None:
    layout = Layout.of([(3, 64)])
    x = torch.linspace(-1e60, 1e60, layout.numel, dtype=torch.float64)
    outcome = exchange(codec_from_text(name), [x, x], layout)
    assert outcome.totals[0].isfinite().all() and outcome.errors[0].isfinite().all()


def test_dense_is_the_sum_in_the_memory_of_x() -> None:
    codec: Codec = Dense()
    layout = Layout.of([(5, 7)])
    xs = inputs(layout, 3)
    outcome = exchange(codec, xs, layout)
    assert torch.equal(outcome.totals[1], xs[0] + xs[1] + xs[2])
    assert outcome.totals[1].data_ptr() == outcome.errors[1].data_ptr()
    assert outcome.bytes_sent == [codec.bytes_sent(layout, 3, rank) for rank in range(3)] == [186] * 3


def test_only_low_rank_wants_tensors_whole() -> None:
    assert [name for name in CODECS if codec_from_text(name).whole] == ["low_rank"]
    assert LowRank().whole and Dense().exact and not any(codec_from_text(name).exact for name in INEXACT)
    assert all(codec_from_text(name).describe(4) for name in CODECS)
