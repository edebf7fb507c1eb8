# SPDX-License-Identifier: Apache-2.0
"""accelerate, alone and with workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.errors import UnsupportedError
from tests.doors.adapters.digits import (
    EPOCHS,
    Digits,
    Net,
    all_once,
    loader,
    make_net,
    make_optimizer,
    plain_loop,
    state_of,
)
from tests.helpers import same_bits, simulate

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from paceline.doors.adapters.accelerate import PacelineAccelerator


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """accelerate keeps its state once for a process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def ours(rule: str, every: int = 1, **settings: Any) -> PacelineAccelerator:
    return PacelineAccelerator(rule, accelerator={"cpu": True, "gradient_accumulation_steps": every}, **settings)


def train(
    make: Callable[[], Any],
    *,
    dropout: float = 0.0,
    clip: float | None = None,
    save: tuple[Path, int] | None = None,
    load: Path | None = None,
) -> Net:
    accelerator = make()
    net = make_net(dropout)
    model, optimizer, data = accelerator.prepare(net, make_optimizer(net), loader())
    torch.manual_seed(11)
    part = accelerator.share(data) if isinstance(accelerator, PacelineAccelerator) else data
    first = 0
    if load is not None:
        accelerator.load_state(load)
        first = accelerator.run.epoch
    for _ in range(first, EPOCHS):
        for batch in part:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients and clip is not None:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            if save is not None and accelerator.run.minibatches == save[1]:
                accelerator.save_state(save[0])
                net.saved = accelerator.run.global_state()
    net.main = accelerator.is_main_process
    accelerator.end_training()
    return net


def test_one_worker_has_the_bits_of_accelerate_alone() -> None:
    alone = train(lambda: Accelerator(cpu=True), dropout=0.2)
    AcceleratorState._reset_state(reset_partial_state=True)
    with_us = train(lambda: ours("bmuf"), dropout=0.2)
    assert same_bits(state_of(alone), state_of(with_us))
    assert alone.seen == with_us.seen


@pytest.mark.parametrize(
    ("rule", "settings", "every"), [("bmuf", {"period": 4}, 1), ("bmuf", {"period": 2}, 3), ("sync", {}, 3)]
)
def test_two_workers_do_what_the_two_lines_do(rule: str, settings: dict[str, Any], every: int) -> None:
    found = simulate(lambda: train(lambda: ours(rule, every, **settings), clip=0.5), 2)
    plain = simulate(lambda: plain_loop(rule, every=every, clip=0.5, **settings), 2)
    assert all_once([net.seen for net in found])
    for net, other in zip(found, plain, strict=True):
        assert same_bits(state_of(net), state_of(other))
    assert [net.main for net in found] == [True, False]


def test_a_resume_has_the_same_bits_and_the_file_the_global_model(tmp_path: Path) -> None:
    whole = simulate(lambda: train(lambda: ours("bmuf", period=4), save=(tmp_path, 5)), 2)
    from safetensors.torch import load_file

    assert same_bits(load_file(tmp_path / "model.safetensors"), whole[0].saved)
    again = simulate(lambda: train(lambda: ours("bmuf", period=4), load=tmp_path), 2)
    for one, other in zip(whole, again, strict=True):
        assert same_bits(state_of(one), state_of(other))


def test_data_that_nobody_shares_are_refused_in_training_and_whole_in_evaluation() -> None:
    def body() -> int:
        accelerator = ours("bmuf")
        net = make_net()
        model, _, data = accelerator.prepare(net, make_optimizer(net), DataLoader(Digits(), 8))
        assert accelerator.num_processes == 1
        assert len(data) == 14
        for batch in data:
            accelerator.backward(model(**batch)["loss"])
        return 0

    with pytest.raises(UnsupportedError, match=r"accelerator\.share"):
        simulate(body, 2)
