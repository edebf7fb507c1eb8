# SPDX-License-Identifier: Apache-2.0
"""The side stream of exchanges: what it and training wait for on each other, and copies through pinned memory."""

from __future__ import annotations

import pytest
import torch

from paceline.update.exchange.pipeline import Pipeline, SideStream, moved

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CYCLES = 50_000_000
"""Of a kernel that does nothing: tens of milliseconds."""


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_the_side_stream_sees_what_training_had_queued_and_training_what_it_gives() -> None:
    side, x = SideStream(device()), torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(CYCLES)
    x.fill_(3.0)
    side.fork()
    with side.entered():
        torch.cuda._sleep(CYCLES)
        y = x * 2
    side.join()
    assert (y + 1).eq(7.0).all()


def test_training_does_not_wait_before_it_joins() -> None:
    side, ended, trained = SideStream(device()), torch.cuda.Event(), torch.cuda.Event()
    side.fork()
    with side.entered():
        torch.cuda._sleep(100 * CYCLES)
        ended.record()
    torch.zeros(8, device="cuda").add_(1)
    trained.record()
    trained.synchronize()
    assert not ended.query()
    side.join()
    torch.cuda.current_stream().synchronize()
    assert ended.query()


def test_an_exchange_on_the_side_stream_gives_its_result_to_training() -> None:
    class Done:
        def wait(self) -> None:
            torch.cuda._sleep(CYCLES)

    def exchange(x: torch.Tensor):  # type: ignore[no-untyped-def]
        y = x + 1
        yield Done()
        y = y * 2
        yield Done()
        return y * 3

    pipeline = Pipeline(False, 2, SideStream.beside([device()]))
    x = torch.full((1 << 20,), 1.0, device="cuda")
    running = [pipeline.start(exchange(x + k)) for k in range(3)]
    for k, one in enumerate(running):
        assert one.finish().eq((2.0 + k) * 6).all()


def test_a_copy_to_the_host_is_complete_and_pinned() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(CYCLES)
    x.fill_(5.0)
    copy = moved(x, torch.device("cpu"))
    assert copy.is_pinned() and copy.eq(5.0).all()
    x.zero_().copy_(copy, non_blocking=True)
    assert x.eq(5.0).all()


def test_a_copy_to_the_device_is_not_waited_for() -> None:
    x, ended = torch.arange(1000), torch.cuda.Event()
    torch.cuda._sleep(100 * CYCLES)
    ended.record()
    there = moved(x, device())
    assert not ended.query()
    x.zero_()
    assert torch.equal(there.cpu(), torch.arange(1000))
