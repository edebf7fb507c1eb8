# SPDX-License-Identifier: Apache-2.0
"""One thread for each test process, and no setting of a surrounding launcher."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from paceline.communication import schedulers

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OURS = ("PACELINE_RULE", "PACELINE_LOG", "PACELINE_TIMEOUT_S")

torch.set_num_threads(1)
# The same examples every time: a new one that fails is for whoever looks for it, not for who changes something else.
settings.register_profile("same", derandomize=not os.environ.get("PACELINE_TEST_RANDOM"))
settings.load_profile("same")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*LAUNCHER, *OURS, *(os.environ.keys() - schedulers.alone(os.environ).keys())]:
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
