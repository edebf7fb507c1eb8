# SPDX-License-Identifier: Apache-2.0
"""What README.md and the documents say is true: their Python runs, their commands exist."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

import paceline
from paceline.cli import app
from tests.nursery import nursery, surroundings

DEADLINE_S = 120.0

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

if not README.is_file():
    pytest.skip("README.md is not written yet", allow_module_level=True)

DOCS = ROOT / "docs"
PAGES = [
    README,
    *DOCS.glob("*.md"),
    *DOCS.glob("guide/*.md"),
    *DOCS.glob("evidence/*.md"),
    DOCS / "reference/recipes.md",
]
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
TEXT = "\n".join(TEXTS.values())


FENCE = re.compile(r"^( *)```(\w*|\{[\w-]+\}.*?)\n(.*?)^\1```", flags=re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "cpp", "console", "sh", "diff", "toml", "json", ""}
"""`python` runs alone as it stands; what changes in a program of the reader's is `diff`."""
ELSEWHERE = {"start.md"}
"""Pages whose programs train for minutes: tests/docs/test_start.py runs them on less text."""


def fenced(*languages: str) -> list[tuple[Path, int, str]]:
    """The blocks in some languages: page, line, and what stands there without the indentation of a list."""
    return [
        (path, text.count("\n", 0, found.start()) + 1, textwrap.dedent(found[3]))
        for path, text in TEXTS.items()
        for found in FENCE.finditer(text)
        if found[2] in languages
    ]


def commands() -> list[str]:
    lines = "\n".join(text for _, _, text in fenced("sh", "console")).replace("\\\n", " ").splitlines()
    typed = [re.sub(r"^[\w.-]*\$ ", "", line.strip()) for line in lines if line.strip() and not line.startswith("#")]
    return [line.strip() for line in typed]


FRAMEWORKS = {"frameworks.md": "sklearn"}
"""Pages whose programs need one."""

PROGRAMS = [block for block in fenced("python") if block[0].name not in ELSEWHERE]


def test_the_readme_is_short_and_says_what_this_is() -> None:
    text = TEXTS[README]
    assert len(text) <= 9000, "move what a newcomer does not need to a page in docs/"
    first = " ".join(text.split("\n\n")[1].split())
    assert all(word in first for word in ("PyTorch", "several machines", "ordinary Ethernet", "No GPU")), first


def test_there_is_something_to_check() -> None:
    assert len(PROGRAMS) > 12, "the pages show no Python"
    assert len(commands()) > 20, "the pages show no command"


def test_every_block_says_what_it_is() -> None:
    """A block that is Python under another name would not be run."""
    used = {found[2] for text in TEXTS.values() for found in FENCE.finditer(text)}
    assert {one for one in used if not one.startswith("{")} <= LANGUAGES


@pytest.mark.claim
@pytest.mark.processes
@pytest.mark.parametrize("page", sorted({block[0] for block in PROGRAMS}), ids=lambda page: page.name)
def test_every_block_of_a_page_runs_alone_as_it_stands(page: Path, tmp_path: Path) -> None:
    if page.name in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[page.name])
    files = []
    for _, line, code in (block for block in PROGRAMS if block[0] == page):
        files.append(tmp_path / f"{page.stem}_line_{line}.py")
        files[-1].write_text(code, encoding="utf-8")
    said, environment = tmp_path / "said", {**surroundings(), "TMPDIR": str(tmp_path)}
    child = nursery().start("tests.docs.run_blocks", list(map(str, files)), environment, tmp_path, said, said)
    assert child.wait(DEADLINE_S) == 0, said.read_text()


def ours() -> list[str]:
    """The command lines of paceline that the pages show, without what stands for a choice of the reader's."""
    lines = [line.partition("  #")[0].strip() for line in commands() if line.startswith("paceline ")]
    return list(dict.fromkeys(line.partition(" | ")[0].partition(" > ")[0] for line in lines))


@pytest.mark.parametrize("line", ours())
def test_a_command_line_of_ours_is_accepted(line: str) -> None:
    """Its command and its options exist, and stand in an order that is taken."""
    words = shlex.split(line)[1:]
    group, context = typer.main.get_command(app), None
    while True:
        context = group.make_context(words[0] if context else "paceline", words[bool(context) :], parent=context)
        if not isinstance(group, TyperGroup):
            return
        words = [*context._protected_args, *context.args]
        _, found, _ = group.resolve_command(context, words)
        assert found is not None, line
        group = found


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    wanted = {target for line in commands() for target in re.findall(r"^make ([\w-]+)", line)}
    assert wanted <= set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))


def test_files_that_are_named_exist() -> None:
    for path, text in TEXTS.items():
        links = {link for link in re.findall(r"\]\(([^)#:]+)\)", text) if not link.startswith("http")}
        for link in links:
            assert (path.parent / link).exists(), (path, link)
    run = {word for line in commands() for word in re.findall(r"(?:examples|benchmarks)/[\w./-]+\.py", line)}
    assert all((ROOT / path).is_file() for path in run), run


def test_the_map_of_the_files_is_true() -> None:
    """Paths in words exist, and so does every folder of the map in CONTRIBUTING.md; the map leaves none out."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    pages = {**TEXTS, ROOT / "CONTRIBUTING.md": contributing}
    named = {
        path for text in pages.values() for path in re.findall(r"\bsrc/paceline(?:_plugins)?/[\w/]+(?:\.py)?", text)
    }
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
    parts = re.search(r"^src/paceline/\n((?:  .*\n)+)", contributing, flags=re.MULTILINE)
    assert parts is not None
    package = ROOT / "src" / "paceline"
    folders = {path.name for path in package.iterdir() if (path / "__init__.py").is_file()}
    assert set(re.findall(r"^  (\w+)/", parts[1], flags=re.MULTILINE)) == folders
    inner = {
        name
        for line in re.findall(r"^    (\S.*)", parts[1], flags=re.MULTILINE)
        for name in re.findall(r"\b(\w+)/", line)
    }
    assert inner <= {path.name for path in package.rglob("*") if path.is_dir()}


def test_the_functions_that_the_map_names_exist() -> None:
    """`Class.method` in CONTRIBUTING.md is a method that the file of this class defines."""
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "src" / "paceline").rglob("*.py")]
    named = re.findall(r"`([A-Z][a-z]\w+)\.(\w+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 8
    for owner, method in named:
        there = any(re.search(rf"class {owner}\b", text) and f"def {method}(" in text for text in files)
        assert there, f"CONTRIBUTING.md names {owner}.{method}"


@pytest.mark.parametrize("text", re.findall(r'--rule "([^"]+)"', TEXT))
def test_rules_that_are_named_exist(text: str) -> None:
    assert ":" in text or paceline.rule_from_text(text)  # a module of the reader's own
