# SPDX-License-Identifier: Apache-2.0
"""What the documentation site makes at build time: the recipes' pages, their pictures, equations, the front page."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

import paceline
from paceline.rules.recipes import RECIPES
from paceline.rules.traffic import bytes_formula

ROOT = Path(paceline.__file__).parents[2]
DOCS = ROOT / "docs"

if not (DOCS / "conf.py").is_file():
    pytest.skip("the documents are not beside the package", allow_module_level=True)
pytest.importorskip("sphinx")
pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def _extensions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    yield
    for name in {"recipe_pages", "recipe_plots", "docstrings", "front", "draw", "canvas"} & (set(sys.modules) - before):
        del sys.modules[name]


def extension(name: str) -> ModuleType:
    return importlib.import_module(name)


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "records/2026-11-22_recipes/curves.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipes_page_has_all_that_explain_says(name: str) -> None:
    recipe, text = RECIPES[name], extension("recipe_pages").page(RECIPES[name], results())
    rule = recipe.build()
    for choice in ("schedule", "payload", "codec", "topology", "outer"):
        assert getattr(rule, choice).describe(4) in text
    assert recipe.equation in text
    assert recipe.when in text
    assert bytes_formula(rule) in text
    assert re.search(r"one worker with .+ at \d+\.\d{3}\.", " ".join(text.split()))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_setting_is_explained(name: str) -> None:
    rows = extension("recipe_pages").settings(RECIPES[name])
    assert rows
    assert all(meaning.strip() for _, _, meaning in rows)


def test_the_pictures_are_those_that_the_script_draws() -> None:
    pictures = extension("draw").PICTURES
    assert {path.stem for path in (DOCS / "pictures").glob("*.svg")} == set(pictures)
    for name, drawn in pictures.items():
        text = (DOCS / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
        assert text == drawn().svg(), "run python docs/pictures/draw.py"
        assert len(text) < 32_000
        assert ElementTree.fromstring(text).tag.endswith("svg")


def test_every_document_is_on_the_site() -> None:
    """Sphinx warns of one that is in no table of contents; here it is named without a build."""
    indexes = [DOCS / name for name in ("index.md", "reference.md", "evidence/index.md")]
    listed = [line.split()[-1].strip("<>") for path in indexes for line in path.read_text("utf-8").splitlines() if line]
    pages = [path for folder in (".", "guide", "evidence", "reference") for path in DOCS.glob(f"{folder}/*.md")]
    for page in sorted({*pages} - {DOCS / "index.md"}):
        assert any(page.stem == one.rpartition("/")[2] for one in listed), f"name {page.name} in docs/index.md"
