# SPDX-License-Identifier: Apache-2.0
"""What the codecs cost: time in copies of the same tensor, and bytes against their formulas.

One thread. For each codec, several times in turn with a plain copy: *encode* (add the residual, quantise, pack, leave
the error) and *decode* (unpack one peer's payload of the same total size and add it). Top-k and low rank cannot be cut
so: theirs is the arithmetic of a whole exchange of one worker. The tensors are those of ResNet-50, or one square
matrix. The bytes are counted on the wire of real exchanges among four workers in one thread, on a smaller layout.

    python benchmarks/codecs.py [--megabytes 100] [--shape resnet50|square] [--repetitions 7]

The last line is a JSON object: `copies.NAME`, the median ratio of encode + decode to a copy, and
`bytes_over_formula.NAME`, which must be 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import _quick
import torch
from torch import Tensor

from paceline.rules.codec import Codec, Layout, LowRank, State, Steps, TopK, TwoSided, codec_from_text

NAMES = ("one_bit", "sign", "e3m0", "int8", "bf16", "fp16", "top_k", "low_rank")
WORKERS = 4


def resnet50() -> list[tuple[int, ...]]:
    """The shapes of ResNet-50's parameters, 102 MB."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inside = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(depth):
            for shape in ((width, inside, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(4 * width, inside, 1, 1), (4 * width,), (4 * width,)]
            inside = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def layout_of(shape: str, megabytes: float) -> Layout:
    """The whole of it, or its first `megabytes`."""
    numel = int(megabytes * 250_000)
    if shape == "square":
        side = max(1, int(numel**0.5))
        return Layout.of([(side, side)])
    layout = Layout.of(resnet50())
    return layout.cut(0, min(numel, layout.numel))


@dataclass
class Operation:
    """What one worker started on the wire."""

    out: Tensor
    x: Tensor
    out_sizes: list[int] | None = None
    in_sizes: list[int] | None = None

    def wait(self) -> None:
        """The driver has moved the bytes before it resumes anybody."""


@dataclass
class CountingWire:
    """One worker's end of a wire in memory."""

    rank: int
    size: int
    bytes_sent: int = 0

    def sum(self, x: Tensor) -> Steps[None]:
        """A ring's bytes."""
        self.bytes_sent += 2 * 4 * x.numel() * (self.size - 1) // self.size
        yield Operation(x, x)

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Operation:
        """What goes to others."""
        self.bytes_sent += sum(in_sizes) - in_sizes[self.rank]
        return Operation(out, x, out_sizes, in_sizes)

    def space(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Fresh memory."""
        return torch.empty(elements, dtype=dtype, device=device)


def move(operations: list[Operation]) -> None:
    """Carry out what all workers started."""
    if operations[0].in_sizes is None:
        total = torch.stack([operation.x for operation in operations]).sum(0)
        for operation in operations:
            operation.out.copy_(total)
        return
    parts = [torch.split(operation.x.clone(), operation.in_sizes or []) for operation in operations]
    for rank, operation in enumerate(operations):
        torch.cat([sender[rank] for sender in parts], out=operation.out)


def exchange(codec: Codec, xs: list[Tensor], layout: Layout, states: list[State]) -> tuple[list[State], list[int]]:
    """One exchange in lockstep: the states after it, and the bytes that each worker sent."""
    wires = [CountingWire(rank, len(xs)) for rank in range(len(xs))]
    running = [codec.exchange(x, layout, w, s) for x, w, s in zip(xs, wires, states, strict=True)]
    while True:
        started: list[Operation] = []
        after: list[State] = []
        for worker in running:
            try:
                started.append(next(worker))  # type: ignore[arg-type]
            except StopIteration as end:
                after.append(end.value[1])
        if after:
            return after, [wire.bytes_sent for wire in wires]
        move(started)


def bytes_over_formula(codec: Codec) -> float:
    """Bytes of two real exchanges among four workers over what `bytes_sent` says."""
    layout = Layout.of([(130, 70), (70,), (33, 5, 3, 3), (900, 7), (1,)])
    states: list[State] = [{} for _ in range(WORKERS)]
    sent = 0
    for _ in range(2):
        states, counted = exchange(codec, [torch.randn(layout.numel) for _ in range(WORKERS)], layout, states)
        sent += sum(counted)
    return sent / (2 * sum(codec.bytes_sent(layout, WORKERS, rank) for rank in range(WORKERS)))


def work_of(codec: Codec, x: Tensor, layout: Layout) -> Callable[[], None]:
    """A function that encodes the tensor and decodes a payload of its size."""
    residual, total = 0.1 * torch.randn_like(x), torch.zeros_like(x)
    if isinstance(codec, TwoSided):
        payload = torch.zeros(codec.payload_bytes(layout), dtype=torch.uint8)

        def both() -> None:
            codec.encode(x, layout, payload, residual)
            codec.decode(payload, layout, total)

        return both
    assert isinstance(codec, (TopK, LowRank))
    memory: State = {"residual": residual}

    def alone() -> None:
        after, _ = exchange(codec, [x], layout, [memory])
        memory.update({name: tensor for name, tensor in after[0].items() if name != "residual"})

    return alone


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turn(copy: Callable[[], object], work: Callable[[], object], repetitions: int) -> list[tuple[float, float]]:
    """Seconds of a copy and of the work, time and again; the first of both is for warmth and does not count."""
    return [(seconds(copy), seconds(work)) for _ in range(repetitions + 1)][1:]


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100, help="of float32 numbers, at most ResNet-50's 102")
    parser.add_argument("--shape", choices=("resnet50", "square"), default="resnet50", help="the tensors")
    parser.add_argument("--repetitions", type=int, default=7, help="of copy and codec in turn")
    parser.add_argument("--only", choices=NAMES, action="append", help="one codec; may be given several times")
    options = _quick.parse(parser, megabytes=4.0, repetitions=1)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layout = layout_of(options.shape, options.megabytes)
    given, into = torch.randn(layout.numel), torch.zeros(layout.numel)
    copies: dict[str, float] = {}
    ratios: dict[str, float] = {}
    print(f"{4e-6 * layout.numel:.1f} MB, {len(layout.matrices)} tensors, one thread")
    print(f"{'codec':10} {'copies':>8} {'ms':>8} {'copy ms':>8} {'MB sent, N=4':>13} {'bytes/formula':>14}")
    for name in options.only or NAMES:
        codec = codec_from_text(name)
        rows = in_turn(lambda: into.copy_(given), work_of(codec, given.clone(), layout), options.repetitions)
        copies[name] = round(statistics.median(work_s / copy_s for copy_s, work_s in rows), 2)
        ratios[name] = bytes_over_formula(codec)
        copy_ms, work_ms = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        sent_mb = 1e-6 * codec.bytes_sent(layout, WORKERS, 0)
        print(f"{name:10} {copies[name]:8.2f} {work_ms:8.1f} {copy_ms:8.1f} {sent_mb:13.3f} {ratios[name]:14.4f}")
    print(json.dumps({"copies": copies, "bytes_over_formula": ratios}))


if __name__ == "__main__":
    main()
