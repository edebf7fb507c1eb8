# SPDX-License-Identifier: Apache-2.0
"""One thread for each test process, the same random numbers in each test, no setting of a surrounding launcher."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from hypothesis import settings

collect_ignore_glob = [] if importlib.util.find_spec("paceline_lightrnn") else ["*"]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

torch.set_num_threads(1)
settings.register_profile("same", derandomize=not os.environ.get("PACELINE_TEST_RANDOM"))
settings.load_profile("same")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*LAUNCHER, *(name for name in os.environ if name.startswith("PACELINE_"))]:
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
