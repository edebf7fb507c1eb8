# SPDX-License-Identifier: Apache-2.0
"""What README.md and the documents say is true: their Python runs, their commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline

ROOT = Path(paceline.__file__).parents[2]
README = ROOT / "README.md"

if not README.is_file():
    pytest.skip("README.md is not written yet", allow_module_level=True)

TEXTS = {path: path.read_text(encoding="utf-8") for path in (README, *sorted((ROOT / "docs").glob("*.md")))}
TEXT = "\n".join(TEXTS.values())


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = "\n".join(blocks("(?:sh|bash|console|shell)")).replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ").strip() for line in lines if line.strip() and not line.startswith("#")]


def names() -> dict[str, object]:
    """What a reader has by then: a model, an optimizer, a loader."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = [(torch.randn(3, 4), torch.randint(0, 2, (3,))) for _ in range(4)]
    return {
        "torch": torch,
        "nn": nn,
        "paceline": paceline,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loader": data,
        "loss_fn": nn.functional.cross_entropy,
        "criterion": nn.functional.cross_entropy,
        "__name__": "__main__",
    }


def test_there_is_something_to_check() -> None:
    assert blocks("python"), "the README shows no Python"
    assert commands(), "the README shows no command"


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space = names()
    exec(compile(code, "README.md", "exec"), space)
    for value in space.values():
        if isinstance(value, paceline.Run):
            value.close()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted = {target for line in commands() for target in re.findall(r"^make ([\w-]+)", line)}
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    assert wanted <= targets


def test_commands_of_ours_exist() -> None:
    wanted = {word for line in commands() for word in re.findall(r"(?:^|\s)paceline ([a-z]+)", line)}
    if not wanted:
        pytest.skip("the README shows no command of ours")
    said = subprocess.run(
        [sys.executable, "-m", "paceline", "--help"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert all(re.search(rf"\b{word}\b", said) for word in wanted), said


def test_files_that_are_named_exist() -> None:
    for path, text in TEXTS.items():
        links = {link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not link.startswith("http")}
        for link in links:
            assert (path.parent / link).exists(), (path, link)
    run = {word for line in commands() for word in re.findall(r"(?:examples|benchmarks)/[\w./-]+\.py", line)}
    assert all((ROOT / path).is_file() for path in run), run


@pytest.mark.parametrize("text", re.findall(r'--rule "([^"]+)"', TEXT))
def test_rules_that_are_named_exist(text: str) -> None:
    assert paceline.rule_from_text(text)
