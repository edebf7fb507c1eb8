# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels against torch's lines: on a GPU where there is one, else in Triton's interpreter on the processor.

Triton is large (1 GB installed) and comes with torch's CUDA builds, so no extra installs it: `pip install triton` where
these tests shall run without a GPU.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.core import kernels
from paceline.rules.codec.int8 import Int8
from paceline.rules.codec.one_bit import OneBit
from paceline.rules.codec.select import largest
from paceline.rules.outer import BlockMomentum, Nesterov
from paceline.rules.outer.base import Coefficients

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
INTERPRETER = "TRITON_INTERPRET"
if not CUDA and "triton" not in sys.modules:
    os.environ[INTERPRETER] = "1"  # Triton reads it when it is imported, and at every call
pytest.importorskip("triton", reason="Triton is not installed; it comes with torch's CUDA builds")
if not CUDA and os.environ.get(INTERPRETER) != "1":
    pytest.skip("Triton was imported before its interpreter was chosen; run this file alone", allow_module_level=True)

from paceline.core.kernels import blocks, codecs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, at inf and nan
GROUPS = [(1, 1), (5, 7), (1, 64), (3, 65), (2, 256), (2, 1000)]
LONG = [(2, 4096), (1, 9001)]
EXTREMES = [0.0, -0.0, 1e-45, -1e-38, 3.4e38, -3.4e38, 1e30, 0.5, -0.5, 1.5]


@pytest.fixture
def numbers() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)


def alike(ours: Tensor, theirs: Tensor) -> None:
    """The same bits, nan for nan."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def extremes(rows: int, columns: int, numbers: Callable[..., Tensor]) -> Tensor:
    x = numbers(rows, columns)
    x.view(-1)[: len(EXTREMES)] = torch.tensor(EXTREMES[: x.numel()])
    return x


# -- packing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 63, 4096, 9001])
def test_a_contribution_has_the_bits_of_torch(dtype: torch.dtype, n: int, numbers: Callable[..., Tensor]) -> None:
    values, origin, out = numbers(n).to(dtype), numbers(n), torch.empty(n, device=DEVICE)
    origin[: min(n, 3)] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1e-41][: min(n, 3)])  # ties of bf16, a subnormal
    squares = blocks.difference(values, origin, dtype, out)
    wanted = values.float() - origin.to(dtype).float()
    alike(out, wanted)
    assert squares.sum().sqrt().item() == pytest.approx(wanted.double().norm().item(), rel=1e-6)


def test_the_origin_may_lie_where_the_contribution_goes(numbers: Callable[..., Tensor]) -> None:
    values, origin = numbers(5000), numbers(5000)
    wanted = values - origin
    blocks.difference(values, origin, torch.float32, origin)
    alike(origin, wanted)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_the_sums_of_squares_tell_of_what_is_not_finite(bad: float, numbers: Callable[..., Tensor]) -> None:
    values, origin, out = numbers(9001), numbers(9001), torch.empty(9001, device=DEVICE)
    values[8999] = bad
    squares = blocks.difference(values, origin, torch.float32, out)
    alike(out, values - origin)
    assert squares[:2].isfinite().all() and not squares[2].isfinite()


# -- outer steps ------------------------------------------------------------------------------------------------------

STEPS = [
    BlockMomentum(momentum=0.9, lr=0.7),
    BlockMomentum(momentum=0.9, lr=0.7, nesterov=False),
    BlockMomentum(momentum=0.9, lr=0.7, amplify=0.5),
    Nesterov(momentum=0.9, lr=0.7),
]


@pytest.mark.parametrize("outer", STEPS, ids=repr)
@pytest.mark.parametrize("n", [1, 1000, 5001])
def test_an_outer_step_is_what_torch_says_to_a_rounding(
    outer: Any, n: int, numbers: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rounding may differ where a processor rounds a product before it adds it; the terms are below 8."""
    c = Coefficients(0.9, 0.7, 0.9, 0.85, diversity=1.7, block=2)
    anchor, mean, (name,) = numbers(n), numbers(n), outer.tensors
    state = {name: numbers(n)}
    found = []
    for fused in (True, False):
        monkeypatch.setattr(kernels, "serve", lambda *given, fused=fused: fused)
        theta, own, out = anchor.clone(), {name: state[name].clone()}, torch.empty(n, device=DEVICE)
        start = outer.step(theta, mean, own, c, out)
        found.append((theta, own[name], start, start is theta))
    (*ours, at_anchor), (*theirs, plain_at_anchor) = found
    assert at_anchor == plain_at_anchor
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=8 * 2.0**-23)


# -- codecs -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("shape", [*GROUPS, *LONG])
def test_one_bit_has_the_signs_of_torch_and_its_levels_to_rounding(
    shape: tuple[int, int], feedback: bool, numbers: Callable[..., Tensor]
) -> None:
    codec, (rows, columns) = OneBit(), shape
    x, residual = numbers(*shape), numbers(*shape) if feedback else None
    v = x + residual if residual is not None else x.clone()
    codes = torch.full((rows, codec.code_bytes(columns)), 99, dtype=torch.uint8, device=DEVICE)
    levels, plain = torch.empty(rows, 2, device=DEVICE), torch.empty(rows, 2, device=DEVICE)
    rest = x.clone()
    codec.encode_fused(rest, residual, codes, levels)
    wanted = torch.empty_like(codes)
    codec.write(v.clone(), wanted, plain)
    assert torch.equal(codes, wanted)
    torch.testing.assert_close(levels, plain, rtol=1e-5, atol=1e-7)
    alike(rest, v - codec.read(codes, levels, columns))  # what is left is exact for the levels that are sent
    total = numbers(*shape)
    expected = total + codec.read(codes, levels, columns)
    codec.add_fused(total, codes, levels)
    alike(total, expected)


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("shape", GROUPS)
def test_int8_has_the_bits_of_torch(shape: tuple[int, int], feedback: bool, numbers: Callable[..., Tensor]) -> None:
    codec, (rows, columns) = Int8(), shape
    x, residual = extremes(*shape, numbers), numbers(*shape) if feedback else None
    v = x + residual if residual is not None else x.clone()
    codes, levels = torch.empty(shape, dtype=torch.uint8, device=DEVICE), torch.empty(rows, 1, device=DEVICE)
    rest = x.clone()
    codec.encode_fused(rest, residual, codes, levels)
    wanted, plain = torch.empty_like(codes), torch.empty_like(levels)
    sent = codec.write(v.clone(), wanted, plain)
    assert torch.equal(codes, wanted)
    alike(levels, plain)
    alike(rest, v - sent)
    total = numbers(*shape)
    expected = total + codec.read(codes, levels, columns)
    codec.add_fused(total, codes, levels)
    alike(total, expected)


def test_int8_halves_go_to_even_and_zeros_stay_zero() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 2.500001], [0.0, -0.0, 0.0, 0.0, 0.0]], device=DEVICE)
    codes, levels = torch.empty(2, 5, dtype=torch.uint8, device=DEVICE), torch.empty(2, 1, device=DEVICE)
    Int8().encode_fused(x, None, codes, levels)
    assert codes.view(torch.int8).tolist() == [[127, 0, 2, -2, 3], [0, 0, 0, 0, 0]]
    assert levels.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("codec", [OneBit(), Int8()], ids=repr)
def test_a_group_that_is_not_finite_spoils_no_other(codec: Any, numbers: Callable[..., Tensor]) -> None:
    x = numbers(3, 256)
    x[1, 7] = math.nan
    codes = torch.empty(3, codec.code_bytes(256), dtype=torch.uint8, device=DEVICE)
    levels = torch.empty(3, codec.levels, device=DEVICE)
    codec.encode_fused(x, None, codes, levels)
    assert levels[1].isnan().any() and levels[[0, 2]].isfinite().all()
    assert x[[0, 2]].isfinite().all() and x[1].isnan().any()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (10, 3), (4096, 4096), (5000, 100), (9000, 8999)])
def test_the_largest_are_those_of_torch_and_of_equals_the_first(n: int, k: int, numbers: Callable[..., Tensor]) -> None:
    for x in (numbers(n), numbers(n).mul(2).round()):
        kth = x.abs().topk(k).values.amin()
        assert codecs.places(x, kth, k).tolist() == largest(x.cpu(), k).tolist()


def test_the_largest_of_numbers_with_nan_are_places_all_the_same(numbers: Callable[..., Tensor]) -> None:
    x = numbers(5000)
    x[::3] = math.nan
    found = codecs.places(x, x.abs().topk(50).values.amin(), 50)
    assert found.shape == (50,) and int(found.min()) >= 0 and int(found.max()) < 5000


# -- all together -----------------------------------------------------------------------------------------------------
@pytest.fixture
def on_this_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Kernels serve this device, too; the sizes of the tensors that they were asked for."""
    asked: list[int] = []

    def serve(*given: Tensor) -> bool:
        asked.extend(x.numel() for x in given)
        return all(x.dtype == torch.float32 and x.is_contiguous() for x in given)

    monkeypatch.setattr(kernels, "serve", serve)
    yield asked


RULES = [
    "bmuf(period=2)",
    "diloco(period=2)",
    "diloco(period=3, overlap=1)",
    "averaging(period=2, codec='int8')",
    "averaging(period=2, codec='one_bit')",
]


@pytest.mark.parametrize("rule", RULES)
def test_training_with_kernels_follows_training_without(
    rule: str, on_this_device: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def program() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with paceline.attach(model, optimizer, rule) as run:
            generator = torch.Generator().manual_seed(run.world.rank)
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 6, generator=generator).to(DEVICE)).square().mean().backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    ours = paceline.simulate(program, 2)
    assert on_this_device
    monkeypatch.setattr(kernels, "serve", lambda *given: False)
    theirs = paceline.simulate(program, 2)
    for mine, other, plain in zip(ours[0], ours[1], theirs[0], strict=True):
        assert torch.equal(mine, other)  # workers hold the same bits
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paceline.core.kernels import blocks, codecs

P, I, F = "*fp32", "i32", "fp32"
def compiled(kernel, signature, **constants):
    names = {**dict(zip(kernel.arg_names, signature)), **{name: "constexpr" for name in constants}}
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=names, constexprs=constants)
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"]
    for loose in ("mul.f32", "add.f32", "sub.f32", "div.full", "div.approx"):  # contracted or approximate
        assert loose not in asm, (kernel.__name__, loose)
    return asm

for mean in (True, False):
    for start in (True, False):
        assert "fma.rn" in compiled(blocks._step, [P, P, P, P, I, F, F, F, F, F], MEAN=mean, START=start, BLOCK=1024)
for kind, bits in ((P, 0), ("*fp16", 16), ("*bf16", -16)):
    assert "fma.rn" not in compiled(blocks._difference, [kind, P, P, P, I], ROUND=bits, BLOCK=4096)
for feedback in (True, False):
    compiled(codecs._one_bit, [P, P, "*u8", P, I, I], FEEDBACK=feedback, BYTES=512, largest=codecs.LARGEST)
    constants = {"BLOCK": 256, "largest": codecs.LARGEST, "magic": codecs.MAGIC}
    compiled(codecs._int8, [P, P, "*i8", P, I], FEEDBACK=feedback, **constants)
compiled(codecs._add_one_bit, [P, "*u8", P, I, I], BLOCK=4096)
compiled(codecs._add_int8, [P, "*i8", P, I], BLOCK=256)
compiled(codecs._count, [P, P, "*i64", "*i64", I], BLOCK=4096)
compiled(codecs._write, [P, P, "*i64", "*i64", "*i64", "*i64", I, I], BLOCK=4096)
print("compiled")
"""


@pytest.mark.processes
def test_every_kernel_compiles_for_a_gpu_without_contracted_products() -> None:
    """Triton needs no GPU to compile for one. What it may not contract is added with one rounding after the other."""
    environment = {name: value for name, value in os.environ.items() if name != INTERPRETER}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]
