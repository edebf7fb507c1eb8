# SPDX-License-Identifier: Apache-2.0
"""A transport that another distribution brings is named like ours; a name that nobody brings is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from paceline.communication import VARIABLE, connect, kinds
from paceline.errors import UnsupportedError
from tests.helpers import attached

MODULE = """
from paceline.communication import SoloTransport

class Pigeon(SoloTransport):
    name = "pigeon"

def meet(timeout_s, group):
    return Pigeon()
"""


@pytest.fixture
def pigeon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a transport, installed for the test."""
    described = tmp_path / "pigeons-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeons\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[paceline.transports]\npigeon = pigeons:meet\n")
    (tmp_path / "pigeons.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("pigeon")
def test_a_transport_of_another_distribution_is_taken_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pigeon" in kinds()
    assert connect(5.0, kind="pigeon").name == "pigeon"
    monkeypatch.setenv(VARIABLE, "pigeon")
    assert connect(5.0).name == "pigeon"
    with attached(nn.Linear(1, 1), transport="pigeon") as (run, *_):
        assert run.world.size == 1


def test_a_name_that_nobody_brings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "pigeon")
    with pytest.raises(UnsupportedError, match="no installed package has 'pigeon'"):
        connect(5.0)
