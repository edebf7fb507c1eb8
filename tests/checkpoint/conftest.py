# SPDX-License-Identifier: Apache-2.0
"""Tests do not outlive the machine: nothing has to be on the disk, which takes longer than all the rest."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
