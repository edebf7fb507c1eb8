# SPDX-License-Identifier: Apache-2.0
"""How near the work of an exchange comes to a GPU's copy bandwidth, in torch's lines and in Triton's kernels.

Packing with its norm, the outer steps, the codecs and the choice of the largest each have to read and write so many
bytes at least; that, over the seconds that they take, over the bandwidth of a copy on the same device, is a figure: 1
is a copy's speed. `pageable` and `pinned` are copies to host memory, as gloo needs them. The rivals take turns in each
round, and the median over the rounds of the ratio within a round counts.

    python benchmarks/speed/device.py [--elements 64000000] [--rounds 9]

Without a CUDA device it prints `no device` and has no figures; it has not been run on one yet. The last line is a JSON
object: `device`, its name or null, and `over_copy`: work -> figures of `torch` and `triton`, or null.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from torch import Tensor

from paceline.core import kernels
from paceline.rules.codec import Layout
from paceline.rules.codec.int8 import Int8
from paceline.rules.codec.one_bit import OneBit
from paceline.rules.codec.select import largest
from paceline.rules.outer import BlockMomentum, Nesterov
from paceline.rules.outer.base import Coefficients

ROW = 4096
WARM = 3
Work = Callable[[], Any]


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Torch's own lines."""
    serve, kernels.serve = kernels.serve, lambda *given: False
    try:
        yield
    finally:
        kernels.serve = serve


def seconds(work: Work) -> float:
    """Of the device's time."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1000


def packing(values: Tensor, origin: Tensor, out: Tensor) -> Work:
    """The difference and its norm."""

    def work() -> None:
        if kernels.serve(out):
            from paceline.core.kernels.blocks import difference

            difference(values, origin, values.dtype, out).sum().sqrt()
        else:
            torch.linalg.vector_norm(torch.sub(values, origin, out=out))

    return work


def coding(codec: Any, x: Tensor, residual: Tensor, payload: Tensor, layout: Layout) -> tuple[Work, Work]:
    """Encoding with feedback, and adding what was decoded."""
    codec.encode(x, layout, payload, residual)
    return (lambda: codec.encode(x, layout, payload, residual)), (lambda: codec.decode(payload, layout, x))


def works(elements: int) -> dict[str, tuple[float, Work]]:
    """Work -> the least bytes that it reads and writes, and what does it."""
    n = elements // ROW * ROW
    x, y, z, out = (torch.randn(n, device="cuda") for _ in range(4))
    layout, c = Layout.of([(n // ROW, ROW)]), Coefficients(0.9, 0.7, 0.9, 0.9)
    momentum, nesterov = BlockMomentum(momentum=0.9, lr=0.7), Nesterov(momentum=0.9, lr=0.7)
    found: dict[str, tuple[float, Work]] = {
        "pack": (12 * n, packing(x, y, out)),
        "block_momentum": (24 * n, lambda: momentum.step(x, y, {"delta": z}, c, out)),
        "nesterov": (20 * n, lambda: nesterov.step(x, y, {"momentum": z}, c, out)),
        "top_k": (4 * n, lambda: largest(y, n // 100)),
    }
    for name, codec in (("one_bit", OneBit()), ("int8", Int8())):
        payload = torch.empty(codec.payload_bytes(layout), dtype=torch.uint8, device="cuda")
        encode, decode = coding(codec, torch.randn_like(x), z, payload, layout)
        found[f"{name}_encode"] = (12 * n + payload.numel(), encode)
        found[f"{name}_decode"] = (8 * n + payload.numel(), decode)
    return found


def copies(elements: int) -> dict[str, tuple[float, Work]]:
    """Copies to host memory: bytes and work."""
    x = torch.randn(elements, device="cuda")
    pageable, pinned = torch.empty(elements), torch.empty(elements, pin_memory=True)
    return {
        "pageable": (4 * elements, lambda: pageable.copy_(x)),
        "pinned": (4 * elements, lambda: pinned.copy_(x, non_blocking=True)),
    }


def measured(elements: int, rounds: int) -> dict[str, dict[str, float]]:
    """Work -> kind of arithmetic -> bytes a second over those of a copy, the median over the rounds."""
    a, b = torch.randn(elements, device="cuda"), torch.empty(elements, device="cuda")
    kinds = {"torch": without_kernels}
    if kernels.arithmetic([a.device]) == "triton":
        kinds["triton"] = contextlib.nullcontext  # type: ignore[assignment]
    rows: dict[tuple[str, str], list[float]] = {}
    every = works(elements)
    for turn in range(WARM + rounds):
        copy = 8 * elements / seconds(lambda: b.copy_(a))
        for name, (nbytes, work) in every.items():
            for kind, context in kinds.items():
                with context():
                    rate = nbytes / seconds(work)
                if turn >= WARM:
                    rows.setdefault((name, kind), []).append(rate / copy)
        for name, (nbytes, work) in copies(elements).items():
            if turn >= WARM:
                rows.setdefault((name, "torch"), []).append(nbytes / seconds(work) / copy)
    found: dict[str, dict[str, float]] = {}
    for (name, kind), ratios in rows.items():
        found.setdefault(name, {})[kind] = round(statistics.median(ratios), 3)
    return found


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=64_000_000, help="float32 numbers")
    parser.add_argument("--rounds", type=int, default=9)
    options = _quick.parse(parser, elements=1 << 20, rounds=2)
    if not torch.cuda.is_available():
        print("no device")
        print(json.dumps({"device": None, "over_copy": None}))
        return
    found = measured(options.elements, options.rounds)
    print(f"{'of the copy bandwidth':22} {'torch':>8} {'triton':>8}")
    for name, row in found.items():
        print(f"{name:22} " + " ".join(f"{row[kind]:8.3f}" if kind in row else " " * 8 for kind in ("torch", "triton")))
    print(json.dumps({"device": torch.cuda.get_device_name(), "over_copy": found}))


if __name__ == "__main__":
    main()
