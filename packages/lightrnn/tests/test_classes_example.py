# SPDX-License-Identifier: Apache-2.0
"""The classifier of thousands of functions: its samples, and that a short training learns its table."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "many_classes"

if not EXAMPLE.is_dir():
    pytest.skip("the examples are not beside the package", allow_module_level=True)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The example's `data` and `train`."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import train

    import data

    yield data, train
    del sys.modules["data"], sys.modules["train"]


def test_a_sample_is_a_call_and_the_other_names(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = modules
    (tmp_path / "a.py").write_text("def call(x):\n    y = sorted(x, key=len)\n    return 1\nf()\n")
    monkeypatch.setattr(data, "ROOTS", [tmp_path])
    assert list(data.lines(10)) == [("sorted", ["y", "x", "key", "len"])]
    calls = data.Calls([("sorted", ["y", "x"]), ("rare", ["z"])], {"x": 1}, {"sorted": 0})
    assert len(calls) == 1 and calls[0][0].tolist() == [0, 1] + [0] * 10 and calls[0][1] == 0


def test_a_short_training_allocates_the_classes_anew(
    modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, train = modules
    monkeypatch.setattr(data, "ROOTS", [Path(asyncio.__file__).parent])
    found = []
    reallocate = train.TableLearner.reallocate
    monkeypatch.setattr(train.TableLearner, "reallocate", lambda *given: found.append(reallocate(*given)))
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "2", "--width", "16"])
    train.main()
    assert len(found) == 1 and found[0].after < found[0].before
    assert capsys.readouterr().out.count("of the held-out calls are right") == 2
