# SPDX-License-Identifier: Apache-2.0
"""Packing: NumPy and plain torch operations give the same bits, one by one and over whole exchanges."""

from __future__ import annotations

import pytest
import torch

from paceline.rules.codec import Layout, bits, codec_from_text, select, two_sided
from tests.rules.codec.lockstep import exchange

LAYOUT = Layout.of([(70, 65), (9,), (130, 3), (3, 257), (1,)])


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 65])
def test_eight_to_a_byte_the_first_highest(length: int) -> None:
    flags = torch.randint(2, (3, length), dtype=torch.uint8)
    packed = bits.pack(flags)
    assert packed.shape == (3, -(-length // 8))
    for row in range(3):
        text = "".join(str(int(flag)) for flag in flags[row]).ljust(8 * packed.shape[1], "0")
        assert [int(text[i : i + 8], 2) for i in range(0, len(text), 8)] == packed[row].tolist()
    assert torch.equal(bits.pack_shifts(flags), packed)
    assert torch.equal(bits.unpack_numpy(packed, length), flags)
    assert torch.equal(bits.unpack_shifts(packed, length), flags)


def test_a_choice_of_levels_is_exact() -> None:
    flags = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.uint8)
    high, low = torch.tensor([[0.1], [1e30]]), torch.tensor([[-3e-42], [0.0]])
    assert torch.equal(bits.choose(flags, high, low), torch.where(flags.bool(), high, low))


def test_zero_counts_as_not_negative_whatever_its_sign() -> None:
    assert bits.not_negative(torch.tensor([[0.0, -0.0, -1e-45, 1e-45]])).tolist() == [[1, 1, 0, 1]]


@pytest.mark.parametrize("name", ["one_bit", "sign", "e3m0", "int8", "fp16", "top_k(ratio=0.03)"])
def test_without_numpy_an_exchange_has_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_from_text(name)
    xs = [torch.randn(LAYOUT.numel) for _ in range(3)]
    first = exchange(codec, xs, LAYOUT)
    second = exchange(codec, xs, LAYOUT, first.states)
    for module in (bits, select):
        monkeypatch.setattr(module, "on_processor", lambda x: False)
    plain = exchange(codec, xs, LAYOUT, first.states)
    assert torch.equal(plain.totals[0], second.totals[0])
    assert all(torch.equal(a, b) for a, b in zip(plain.errors, second.errors, strict=True))


@pytest.mark.parametrize("name", ["one_bit", "sign", "e3m0", "int8", "fp16"])
def test_the_size_of_a_piece_does_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_from_text(name)
    xs = [torch.randn(LAYOUT.numel) for _ in range(2)]
    whole = exchange(codec, xs, LAYOUT)
    monkeypatch.setattr(two_sided, "_CACHED", 200)
    cut = exchange(codec, xs, LAYOUT)
    assert torch.equal(cut.totals[0], whole.totals[0])
    assert all(torch.equal(a, b) for a, b in zip(cut.errors, whole.errors, strict=True))


@pytest.mark.parametrize("numel", [5, 1000, 40_000])
def test_the_largest_are_those_of_a_full_sort(numel: int) -> None:
    kinds = [torch.randn(numel), torch.randint(-3, 4, (numel,)).float(), torch.zeros(numel)]
    sparse = torch.zeros(numel)
    sparse[:: max(1, numel // 7)] = 1e-30
    for x in [*kinds, sparse, torch.linspace(0, 1, numel).double()]:
        for k in {1, 3, numel // 100 + 1, numel // 2, numel - 1, numel}:
            order = sorted(range(numel), key=lambda m, x=x.abs().tolist(): (-x[m], m))  # type: ignore[misc]
            assert select.largest(x, k).tolist() == sorted(order[:k])


def test_a_misleading_sample_costs_time_only() -> None:
    x = torch.zeros(40_000)
    x[:: select._STEP] = 5.0
    x[7] = 9.0
    assert select.largest(x, 2).tolist() == [0, 7]
    x = torch.ones(40_000)
    x[:: select._STEP] = 0.0
    assert select.largest(x, 39_000).tolist() == [m for m in range(40_000) if m % select._STEP][:39_000]
