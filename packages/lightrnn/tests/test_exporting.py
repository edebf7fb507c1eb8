# SPDX-License-Identifier: Apache-2.0
"""The graph of the next words: it gives what the model gives, also as a file of `torch.export` and of ONNX."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline import MismatchError
from paceline_lightrnn import LightRNN, NextWords, WordTable

TABLES = {
    "full": WordTable.random(12, 3, 4, seed=1),
    "with empty cells": WordTable.random(10, 3, 4, seed=2),
    "with rows without words": WordTable(torch.tensor([0, 1, 3, 12, 15, 13]), 4, 4),
}


def model_of(table: WordTable, cell: str = "lstm", layers: int = 1) -> LightRNN:
    torch.manual_seed(0)
    model = LightRNN(table, 6, cell=cell, layers=layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.eval()


def texts(table: WordTable) -> Tensor:
    """Three words of two sequences, after the end of a line."""
    drawn = torch.randint(table.words, (2, 3), generator=torch.Generator().manual_seed(1))
    return torch.cat((torch.zeros(2, 1, dtype=torch.int64), drawn), 1)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_it_gives_what_the_model_gives(kind: str, cell: str) -> None:
    model = model_of(TABLES[kind], cell, 2)
    step, text = NextWords(model, 4, rows=9), texts(model.table)
    hidden, state = step.begin(2), model.begin(2)
    for t in range(text.shape[1]):
        if t:
            state = model.advance(state, text[:, t])
        words, log_probs, exact, hidden = step(text[:, t], hidden)
        wanted = model.next_words(state, 4)
        torch.testing.assert_close(log_probs, wanted[1])
        assert torch.equal(words, wanted[0]) and bool(exact.all())


def test_it_says_where_the_tried_rows_are_not_enough() -> None:
    model = model_of(WordTable.random(100, 10, 10))
    steps = {rows: NextWords(model, 3, rows=rows) for rows in range(1, 11)}
    words = torch.arange(100)
    best = steps[10](words, steps[10].begin(100))[0]
    shares = []
    for step in steps.values():
        found, _, exact, _ = step(words, step.begin(100))
        assert torch.equal(found[exact], best[exact])
        shares.append(float(exact.float().mean()))
    assert shares == sorted(shares) and shares[0] < 0.9 and shares[-1] == 1.0


@pytest.mark.slow
def test_an_exported_program_gives_the_same(tmp_path: Path) -> None:
    step = NextWords(model_of(TABLES["with empty cells"]), 4, rows=2)
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = ({0: batch}, ({1: batch}, {1: batch}))
    program = torch.export.export(step, (torch.tensor([0, 3]), step.begin(2)), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "next.pt2")
    loaded = torch.export.load(tmp_path / "next.pt2").module()
    for batch in (2, 5):
        words = torch.arange(batch)
        wanted, hidden = step(words, step.begin(batch)), step.begin(batch)
        for one, other in zip(wanted[:3], loaded(words, hidden)[:3], strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("k", "rows"), [(0, 2), (11, 3), (5, 1)])
def test_more_words_than_there_are_are_refused(k: int, rows: int) -> None:
    with pytest.raises(MismatchError, match=f"got {k}"):
        NextWords(model_of(TABLES["with empty cells"]), k, rows)


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_onnx_runtime_gives_the_same(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    step, path = NextWords(model_of(TABLES["with empty cells"]), 4, rows=2), tmp_path / "next.onnx"
    word, hidden = torch.tensor([3]), step.begin(1)
    torch.onnx.export(step, (word, hidden), str(path), dynamo=True, verbose=False)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    given = dict(zip(names, (one.numpy() for one in (word, *hidden)), strict=True))
    words, log_probs, exact, *_ = step(word, hidden)
    found = [torch.from_numpy(one) for one in session.run(None, given)[:3]]
    torch.testing.assert_close(found[1], log_probs)
    assert torch.equal(found[0], words) and torch.equal(found[2], exact)
