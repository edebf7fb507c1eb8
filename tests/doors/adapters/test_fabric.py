# SPDX-License-Identifier: Apache-2.0
"""Lightning's Fabric, alone and with workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import UnsupportedError
from tests.doors.adapters.digits import EPOCHS, Net, all_once, loader, make_net, make_optimizer, plain_loop, state_of
from tests.helpers import same_bits, simulate

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]

from lightning.fabric import Fabric  # noqa: E402

from paceline.doors.adapters.fabric import PacelineFabricStrategy  # noqa: E402


def train(
    strategy: Any = "auto",
    *,
    dropout: float = 0.0,
    clip: float | None = None,
    save: tuple[Path, int] | None = None,
    load: Path | None = None,
) -> Net:
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    net = make_net(dropout)
    model, optimizer = fabric.setup(net, make_optimizer(net))
    data = fabric.setup_dataloaders(loader())
    torch.manual_seed(11)
    first = 0
    if load is not None:
        fabric.load(load, {"model": model, "optimizer": optimizer})
        first = fabric.strategy.run.epoch
    for _ in range(first, EPOCHS):
        for batch in data:
            optimizer.zero_grad()
            fabric.backward(model(**batch)["loss"])
            if clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            if save is not None and fabric.strategy.run.minibatches == save[1]:
                fabric.save(save[0], {"model": model, "optimizer": optimizer})
                net.saved = fabric.strategy.run.global_state()
    if hasattr(fabric.strategy, "close"):
        fabric.strategy.close()
    return net


def test_one_worker_has_the_bits_of_fabric_alone() -> None:
    assert same_bits(state_of(train(dropout=0.2)), state_of(train(PacelineFabricStrategy("bmuf"), dropout=0.2)))


@pytest.mark.parametrize(("rule", "settings"), [("bmuf", {"period": 4}), ("sync", {})])
def test_two_workers_do_what_the_two_lines_do(rule: str, settings: dict[str, Any]) -> None:
    found = simulate(lambda: train(PacelineFabricStrategy(rule, **settings), clip=0.5), 2)
    plain = simulate(lambda: plain_loop(rule, clip=0.5, **settings), 2)
    assert all_once([net.seen for net in found])
    for net, other in zip(found, plain, strict=True):
        assert same_bits(state_of(net), state_of(other))


def test_a_resume_has_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "at-5.ckpt"
    whole = simulate(lambda: train(PacelineFabricStrategy("bmuf", period=4), save=(path, 5)), 2)
    assert same_bits(torch.load(path, weights_only=True)["model"], whole[0].saved)
    again = simulate(lambda: train(PacelineFabricStrategy("bmuf", period=4), load=path), 2)
    for one, other in zip(whole, again, strict=True):
        assert same_bits(state_of(one), state_of(other))


def test_evaluation_data_are_whole_and_gathered_in_rank_order() -> None:
    def body() -> tuple[int, int, list[float], float]:
        fabric = Fabric(accelerator="cpu", strategy=PacelineFabricStrategy("bmuf"))
        fabric.launch()
        whole = len(fabric.setup_dataloaders(loader(), use_distributed_sampler=False))
        part = len(fabric.setup_dataloaders(loader()))
        mine = torch.tensor(float(fabric.global_rank))
        return whole, part, fabric.all_gather(mine).tolist(), float(fabric.all_reduce(mine))

    assert simulate(body, 2) == [(14, 7, [0.0, 1.0], 0.5)] * 2


def test_what_does_not_go_together_is_refused() -> None:
    fabric = Fabric(accelerator="cpu", strategy=PacelineFabricStrategy("bmuf"))
    fabric.launch()
    net = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"fabric\.setup"):
        fabric.setup_optimizers(make_optimizer(net))
