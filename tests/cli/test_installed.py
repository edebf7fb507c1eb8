# SPDX-License-Identifier: Apache-2.0
"""Commands of other distributions: found by their metadata, imported when called; what cannot be called is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import paceline
from paceline.cli import app
from paceline.cli.installed import PACKAGES

REPOSITORY = Path(paceline.__file__).parents[2]
PAGE = REPOSITORY / "docs" / "guide" / "plugins.md"
LOG = REPOSITORY / "tests" / "fixtures" / "before_the_move" / "log"
PLAIN = """
import click

@click.command()
@click.option("--times", default=1)
@click.argument("words", nargs=-1)
def shout(times, words):
    "Say it loudly."
    for _ in range(times):
        click.echo(" ".join(words).upper())
"""


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` where distributions can be installed; no other distribution has commands."""
    from importlib import metadata

    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    known = metadata.entry_points
    dists = lambda: [str(path.name.partition("-")[0]) for path in folder.glob("*.dist-info")]  # noqa: E731

    def here(**wish: str) -> metadata.EntryPoints:
        found = [one for one in known(**wish) if one.dist is not None and one.dist.name.replace("-", "_") in dists()]
        return metadata.EntryPoints(found)

    monkeypatch.setattr(metadata, "entry_points", here)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]


def install(site: Path, name: str, points: dict[str, str], summary: str = "", **modules: str) -> None:
    """What `pip install` leaves of a distribution."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: {summary}\n")
    lines = "".join(f"{command} = {value}\n" for command, value in points.items())
    (info / "entry_points.txt").write_text(f"[paceline.commands]\n{lines}")
    for module, text in modules.items():
        (site / f"{module}.py").write_text(text, encoding="utf-8")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], prog_name="paceline")


def said(result: Result) -> str:
    return " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


@pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not beside the package")
def test_the_example_of_the_page_is_a_command(site: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    (module,) = (program for program in programs if "typer.Typer(" in program)
    summary, name = (re.findall(rf'^{key} = "(.*)"$', text, flags=re.MULTILINE)[0] for key in ("description", "name"))
    points = dict(re.findall(r'^(\w+) = "(\w+:\w+)"$', text, flags=re.MULTILINE))
    install(site, name, points, summary, paceline_epochs=module)
    assert f"epochs {summary}" in said(run("--help"))
    assert "paceline_epochs" not in sys.modules, "help imports no command"
    assert said(run("epochs", LOG)) == "rank-000: 2 epochs rank-001: 2 epochs"
    asked = run("epochs", "--help")
    assert asked.exit_code == 0 and "Usage: paceline epochs [OPTIONS]" in said(asked)
    wrong = run("epochs", site)
    assert wrong.exit_code == 2 and "holds no event log" in said(wrong)
    wrong = run("epochs", "--nothing", LOG)
    assert wrong.exit_code == 2 and "No such option: --nothing" in said(wrong)


def test_a_plain_click_command_gets_its_arguments_as_they_are(site: Path) -> None:
    pytest.importorskip("click")
    install(site, "acme-shout", {"shout": "acme_shout:shout"}, acme_shout=PLAIN)
    result = run("shout", "--times", 2, "--", "--help", "me")
    assert result.exit_code == 0 and result.output == "--HELP ME\n--HELP ME\n"


@pytest.mark.parametrize(("command", "distribution"), PACKAGES.items())
def test_a_package_that_is_not_installed_says_what_to_install(command: str, distribution: str, site: Path) -> None:
    result = run(command, "train", "--out", "x")
    assert result.exit_code == 2 and f"pip install {distribution} (in" in said(result)
    assert f" {command} " not in said(run("--help"))


@pytest.mark.parametrize(
    ("module", "point", "why"),
    [
        ("import nothing_of_this_name", "acme:app", "No module named 'nothing_of_this_name'"),
        ("x = 1", "acme:app", "module 'acme' has no attribute 'app'"),
        ("raise RuntimeError('no licence')", "acme:app", "RuntimeError: no licence"),
        ("app = 3", "acme:app", "has to give a command, and gives a int"),
        ("app = 3", "", "acme-tools has this command"),
    ],
)
def test_what_cannot_be_loaded_says_whose_it_is_and_why(module: str, point: str, why: str, site: Path) -> None:
    install(site, "acme-tools", {"measure": point}, acme=module)
    result = run("measure")
    assert result.exit_code == 2 and why in said(result) and "acme-tools" in said(result)
    assert run("--help").exit_code == 0, "one that is broken takes nothing from the others"


def test_a_command_of_two_distributions_is_refused(site: Path) -> None:
    install(site, "acme-one", {"measure": "acme:app"})
    install(site, "acme-two", {"measure": "acme:app"})
    result = run("measure")
    assert result.exit_code == 2 and "acme-one and acme-two have a command of this name" in said(result)
    assert "measure cannot be called: acme-one and acme-two have it" in said(run("--help"))
