# SPDX-License-Identifier: Apache-2.0
"""The loss of an unchanged program is that whose backward pass it asked for."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from paceline_plugins.zero.losses import Losses
from paceline_plugins.zero.patches import Patches

pytestmark = pytest.mark.plugins


def test_the_mean_of_the_last_losses_is_logged_unscaled_and_now_and_then() -> None:
    now, logged = [0.0], list[float]()
    run: Any = types.SimpleNamespace(log=lambda loss: logged.append(loss))
    losses = Losses(lambda: now[0])
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Patches() as patches:
        losses.install(patches)
        for step in range(4):
            loss = torch.tensor(float(step), requires_grad=True)
            losses.backward(scaler.scale(loss) if step % 2 else (loss,))
            losses.backward(torch.zeros(3))  # no loss
            now[0] = 1.0 * step
            losses.stepped(run)
    losses.log(run)
    assert logged == [1.0, 3.0]
