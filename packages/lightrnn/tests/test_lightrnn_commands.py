# SPDX-License-Identifier: Apache-2.0
"""`paceline lightrnn`: from a text to a model, a page and made-up words; wishes that cannot be are refused."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline_lightrnn.building import load_model
from paceline_lightrnn.settings import Settings
from paceline_lightrnn.training import HISTORY, STATE

SMALL = (
    "--dimension",
    "8",
    "--rounds",
    "2",
    "--short",
    "0",
    "--batch",
    "4",
    "--window",
    "5",
    "--windows",
    "3",
    "--rate",
    "0.02",
)


def run(*arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["lightrnn", *map(str, arguments)], input=given)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    paths = [os.environ.get("PYTHONPATH"), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))  # for the workers


def write_text(path: Path) -> Path:
    path.write_text("".join(f"the cat number {k % 7} saw the dog {k % 5} .\n" for k in range(60)))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training."""
    folder = tmp_path_factory.mktemp("lightrnn")
    result = run("train", write_text(folder / "text.txt"), "--out", folder / "out", *SMALL, "--threads", 1)
    assert result.exit_code == 0, result.output
    assert re.search(r"round 2: perplexity [\d.]+", result.output) and "words allocated anew" in result.output
    return folder / "out"


def test_training_leaves_a_model_a_history_and_a_page(trained: Path) -> None:
    rows = json.loads((trained / HISTORY).read_text())["rounds"]
    assert [row["round"] for row in rows] == [1, 2] and rows[0]["cost_after"] <= rows[0]["cost_before"]
    page = (trained / "report" / "index.html").read_text()
    for part in ("perplexity", "Words that share a row", "Words that share a column", "full softmax", "<svg", "cat"):
        assert part in page
    assert not re.search(r'(src|href)="https?:', page)
    assert Settings.load(trained / "settings.json").course.rounds == 2


def test_started_again_it_is_over_at_once(trained: Path) -> None:
    before = (trained / HISTORY).read_text()
    result = run("train", trained.parent / "text.txt", "--out", trained, *SMALL)
    assert result.exit_code == 0 and (trained / HISTORY).read_text() == before


def test_other_settings_are_refused_by_name(trained: Path) -> None:
    result = run("train", trained.parent / "text.txt", "--out", trained, *SMALL, "--tied", "--epochs", 2)
    assert result.exit_code == 2
    assert "tied is True now and was False" in result.output and "epochs is 2 now and was 1" in result.output


def test_another_text_is_refused_where_a_training_goes_on(trained: Path, tmp_path: Path) -> None:
    text = trained.parent / "text.txt"
    old = text.read_text()
    try:
        text.write_text(old + "more\n")
        result = run("train", text, "--out", trained, *SMALL)
        assert result.exit_code == 2 and "the text has changed" in result.output
    finally:
        write_text(text)


def test_a_text_is_judged_from_a_file_packed_or_given(trained: Path, tmp_path: Path) -> None:
    text = b"the cat number 3 saw the dog 2 .\n" * 20
    (tmp_path / "t.gz").write_bytes(gzip.compress(text))
    found = json.loads(run("evaluate", trained, tmp_path / "t.gz", "--json").stdout)
    assert found["words"] == 200 and found["unknown"] == 0 and 1 < found["perplexity"] < 15
    worse = tmp_path / "worse.txt"
    worse.write_bytes(b"dog the \xff saw zebra cat\n" * 20)
    said = run("evaluate", trained, worse).stdout
    assert "(28.6 % unknown)" in said and "20 wrong bytes" in said
    assert float(said.split()[1]) > found["perplexity"]


def test_text_is_made_up(trained: Path) -> None:
    one = run("generate", trained, "--prompt", "the cat", "--words", 6, "--samples", 2, "--seed", 1).stdout
    assert one.count("the cat ") >= 2 and "-" * 40 in one
    assert one == run("generate", trained, "--prompt", "the cat", "--words", 6, "--samples", 2, "--seed", 1).stdout
    assert run("generate", trained, "--beam", 3, "--words", 4).exit_code == 0
    assert run("generate", trained, "--top-k", 2, "--temperature", 0.5, "--samples", 1).exit_code == 0


def test_words_are_allocated_once_more(trained: Path) -> None:
    before = load_model(trained)
    result = run("reallocate", trained)
    assert result.exit_code == 0, result.output
    assert re.search(r"cost [\d.e+]+ -> [\d.e+]+ \(-?\+?[\d.]+ %\)", result.stdout)
    assert load_model(trained).table.words == before.table.words  # type: ignore[union-attr]
    again = run("reallocate", trained, "--from", trained / "costs.safetensors")
    changed = load_model(trained).table != before.table  # type: ignore[union-attr]
    assert (again.exit_code == 2 and "another table" in again.output) if changed else again.exit_code == 0


def test_wishes_that_cannot_be(trained: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "t.txt")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    new = tmp_path / "new"
    for arguments, what in (
        (["train", tmp_path / "none.txt", "--out", new], "does not exist"),
        (["train", empty, "--out", new], "no word in the text"),
        (["train", "-", "--out", new], "standard input can be read once"),
        (["train", text, "--out", tmp_path / "full"], "holds no LightRNN training"),
        (["train", text, "--out", text], "is a file"),
        (["train", text, "--out", new, "--rounds", 0], "rounds is at least 1"),
        (["train", text, "--out", new, "--optimizer", "magic"], "adam, sgd"),
        (["train", text, "--out", new, "--output", "magic"], "lightrnn, full, adaptive"),
        (["train", text, "--out", new, "--cell", "magic"], "magic"),
        (["train", text, "--out", new, "--tokens", "magic"], "unicode, space"),
        (["train", text, "--out", new, "--vocabulary", 2], "at least one word"),
        (["train", text, "--out", new, "--table", tmp_path / "none.vec"], "does not exist"),
        (["train", text, "--out", new, "--workers", 0], "at least 1"),
        (["train", text, "--out", new, "--workers", 2, "--rule", "magic"], "magic"),
        (["train", text, "--out", new, "--held-back", 2], "between 0 and 1"),
        (["evaluate", tmp_path, text], "holds no trained model"),
        (["evaluate", trained, empty], "no word in the text"),
        (["generate", tmp_path / "none"], "holds no trained model"),
        (["generate", trained, "--words", 0], "at least 1"),
        (["generate", trained, "--temperature", 0], "temperature"),
        (["reallocate", trained, "--from", tmp_path / "none"], "cannot read the costs"),
        (["reallocate", trained, text, "--from", text], "give one of them"),
        (["report", tmp_path], "holds no trained model"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and what in result.output, (arguments, result.output, result.exception)
    assert not (new / STATE).exists() and (tmp_path / "full" / "mine").read_text() == "mine"


def test_an_ordinary_model_is_trained_to_compare_with(tmp_path: Path) -> None:
    text = write_text(tmp_path / "t.txt")
    result = run("train", text, "--out", tmp_path / "out", *SMALL, "--output", "full", "--rounds", 1)
    assert result.exit_code == 0, result.output
    assert run("generate", tmp_path / "out", "--words", 3).exit_code == 0
    refused = run("reallocate", tmp_path / "out")
    assert refused.exit_code == 2 and "no table" in refused.output


@pytest.mark.slow
@pytest.mark.processes
def test_workers_are_started_by_itself(tmp_path: Path) -> None:
    text = write_text(tmp_path / "t.txt")
    options = ["--out", tmp_path / "out", *SMALL, "--workers", 2, "--rule", "bmuf(period=4)"]
    result = run("train", text, *options)
    assert result.exit_code == 0, result.output
    about = json.loads((tmp_path / "out" / HISTORY).read_text())
    assert about["workers"] == 2 and about["rule"].startswith("bmuf") and len(about["rounds"]) == 2
    assert run("evaluate", tmp_path / "out", text).exit_code == 0


@pytest.mark.processes
def test_help_loads_no_torch() -> None:
    program = (
        "import sys; from paceline_lightrnn.commands.command import app; "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
