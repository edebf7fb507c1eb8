# SPDX-License-Identifier: Apache-2.0
"""A checkpoint goes on with the optimizers that made it, and with no others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoint.files import MANIFEST, own_sum
from tests.helpers import make_net, sgd, simulate

Make = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others}], 0.1)


def saved(path: Path, make: Make, workers: int) -> None:
    def program() -> None:
        model = make_net()
        optimizer = make(model.parameters())
        with paceline.attach(model, optimizer, "bmuf(period=1)") as run:
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            run.save(path)

    simulate(program, workers)


def resumed(path: Path, make: Make, workers: int) -> None:
    def program() -> None:
        model = make_net()
        optimizer = make(model.parameters())
        with paceline.attach(model, optimizer, "bmuf(period=1)") as run:
            run.resume(path)
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()

    simulate(program, workers)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (adam, "made with SGD, and this run trains with Adam"),
        (two_groups, r"their groups have \[\[1, 3\]\] parameters here and \[\[4\]\]"),
    ],
)
def test_another_optimizer_is_refused_before_anything_is_put_back(
    make: Make, said: str, workers: int, tmp_path: Path
) -> None:
    saved(tmp_path / "kept", sgd, 2)
    with pytest.raises(paceline.CheckpointError, match=said):
        resumed(tmp_path / "kept", make, workers)


def test_adam_is_not_adamw_and_the_same_one_goes_on(tmp_path: Path) -> None:
    saved(tmp_path / "kept", adamw, 1)
    resumed(tmp_path / "kept", adamw, 1)
    with pytest.raises(paceline.CheckpointError, match="made with AdamW, and this run trains with Adam;"):
        resumed(tmp_path / "kept", adam, 1)


def test_a_checkpoint_that_names_no_optimizers_is_known_by_their_settings(tmp_path: Path) -> None:
    saved(tmp_path / "kept", sgd, 2)
    manifest = json.loads((tmp_path / "kept" / MANIFEST).read_text())
    del manifest["optimizers"]
    manifest["sum"] = own_sum(manifest)
    (tmp_path / "kept" / MANIFEST).write_text(json.dumps(manifest))
    resumed(tmp_path / "kept", sgd, 2)
    with pytest.raises(paceline.CheckpointError, match=r"other optimizer than Adam: it has .*momentum.*lacks .*betas"):
        resumed(tmp_path / "kept", adam, 2)
