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
from tests.helpers import attached, make_net, sgd, simulate

Make = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others}], 0.1)


def trained(make: Make, workers: int, *, resume: Path | None = None, save: Path | None = None) -> None:
    def program() -> None:
        with attached(make_net(), "bmuf(period=1)", make) as (run, model, optimizer):
            if resume is not None:
                run.resume(resume)
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            if save is not None:
                run.save(save)

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
    trained(sgd, 2, save=tmp_path / "kept")
    with pytest.raises(paceline.CheckpointError, match=said):
        trained(make, workers, resume=tmp_path / "kept")


def test_adam_is_not_adamw_and_the_same_one_goes_on(tmp_path: Path) -> None:
    trained(adamw, 1, save=tmp_path / "kept")
    trained(adamw, 1, resume=tmp_path / "kept")
    with pytest.raises(paceline.CheckpointError, match="made with AdamW, and this run trains with Adam;"):
        trained(adam, 1, resume=tmp_path / "kept")


def test_a_checkpoint_that_names_no_optimizers_is_known_by_their_settings(tmp_path: Path) -> None:
    trained(sgd, 2, save=tmp_path / "kept")
    manifest = json.loads((tmp_path / "kept" / MANIFEST).read_text())
    del manifest["optimizers"]
    manifest["sum"] = own_sum(manifest)
    (tmp_path / "kept" / MANIFEST).write_text(json.dumps(manifest))
    trained(sgd, 2, resume=tmp_path / "kept")
    with pytest.raises(paceline.CheckpointError, match=r"other optimizer than Adam: it has .*momentum.*lacks .*betas"):
        trained(adam, 2, resume=tmp_path / "kept")
