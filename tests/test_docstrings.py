# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings are true, and the public face has some."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import paceline
import paceline.data
import paceline.rules.recipes
import paceline.tuning
import paceline_plugins.data

ROOT = Path(paceline.__file__).parent
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.parent.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)
FACE: dict[str, Any] = {
    **{name: getattr(paceline, name) for name in ("attach", "attach_arrays", "simulate", "rule_from_text")},
    **{name: getattr(paceline, name) for name in ("Rule", "Clock", "Guard")},
    **{name: getattr(paceline.rules.recipes, name) for name in ("bmuf", "sync", "ssp")},
    **{name: getattr(paceline.data, name) for name in ("ShardStream", "BucketBatches", "text_lines", "json_lines")},
    **{name: getattr(paceline_plugins.data, name) for name in ("Files", "Cache", "ParquetDataset")},
    **{name: getattr(paceline.tuning, name) for name in ("Newbob",)},
}
OF_RUN = ("share", "log_to", "tune", "save", "global_model", "model_for_export")


NEEDS = {"paceline_plugins.data.parquet": "pyarrow"}
"""Modules whose examples need an extra."""


@pytest.mark.parametrize("name", FACE)
def test_the_public_face_has_examples(name: str) -> None:
    assert ">>> " in (inspect.getdoc(FACE[name]) or ""), f"show in the docstring of {name} how it is used"


@pytest.mark.parametrize("name", OF_RUN)
def test_an_example_of_run_calls_each_of_its_methods(name: str) -> None:
    own, of_run = inspect.getdoc(getattr(paceline.Run, name)) or "", inspect.getdoc(paceline.Run) or ""
    shown = [line for line in (own + "\n" + of_run).splitlines() if line.startswith((">>> ", "... "))]
    assert any(f"run.{name}(" in line for line in shown), f"call run.{name} in an example of Run or of its own"


@pytest.mark.full
@pytest.mark.law
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # what it has found before
    module = importlib.import_module(name)
    found = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
    assert found, f"no example of {name} was found where doctest looks"
    said: list[str] = []
    for test in found:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)
