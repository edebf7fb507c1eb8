# SPDX-License-Identifier: Apache-2.0
"""A server that misbehaves, and pauses between tries too short to notice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.data.cache import download
from tests.data.cache.server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.001)
