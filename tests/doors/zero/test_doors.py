# SPDX-License-Identifier: Apache-2.0
"""Programs whose work nobody would share: refused before they begin with the door to take, or an end that says so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline_plugins.zero.refusals import Refusal
from tests.doors.zero.programs import virtual
from tests.doors.zero.test_run import paceline_run


def refused(folder: Path, source: str, *options: str, command: str = "run") -> str:
    """What the command says that refuses the program."""
    (folder / "train.py").write_text(source)
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, [command, "--workers", "2", *options, "train.py"])
    assert result.exit_code == 2, result.output
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize("rule", [(), ("--rule", "bmuf")])
@pytest.mark.parametrize(
    ("source", "why", "door"),
    [
        ("import torch.distributed as dist", "train.py uses torch.distributed", "--force-zero-lines"),
        ("from torch.nn.parallel import DistributedDataParallel", "uses torch.nn.parallel", "docs/guide/frameworks.md"),
        (
            "import lightning as L",
            "uses lightning, which makes",
            "PacelineStrategy(..)) of paceline.doors.adapters.lightning",
        ),
        ("from lightning.fabric import Fabric", "uses lightning.fabric", "PacelineFabricStrategy"),
        ("import pytorch_lightning", "uses pytorch_lightning", "PacelineStrategy"),
        ("from transformers import Trainer", "uses transformers.Trainer", "PacelineCallback"),
        ("import transformers\ntransformers.Seq2SeqTrainer", "uses transformers.Seq2SeqTrainer", "PacelineCallback"),
        ("from trl import SFTTrainer", "uses trl", "PacelineCallback"),
        ("from accelerate import Accelerator", "uses accelerate", "PacelineAccelerator"),
        ("import torch, deepspeed", "uses deepspeed", "take the cluster out"),
        ("import keras", "trains with keras", "paceline_plugins.frameworks.keras"),
        ("import torch, keras", "trains with keras", "paceline_plugins.frameworks.keras"),
        (
            "from sklearn.linear_model import SGDClassifier",
            "trains with sklearn",
            "paceline_plugins.frameworks.sklearn",
        ),
        ("import jax", "trains with jax", "paceline_plugins.frameworks.jax"),
        ("import tensorflow as tf", "trains with tensorflow", "attach_arrays(variables)"),
        ("import chainer", "trains with chainer", "attach_arrays(arrays)"),
        ("import xgboost", "trains with xgboost", "no adapter for it"),
    ],
)
def test_a_program_with_another_door_is_refused_and_the_door_is_named(
    source: str, why: str, door: str, rule: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(tmp_path, source, *rule)
    assert why in said and door in said and "2 workers would do the whole job each" in said and "--as-is" in said
    assert "--force-zero-lines" in said


def test_a_simulation_refuses_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "uses accelerate" in refused(tmp_path, "import accelerate", command="sim")


@pytest.mark.parametrize(
    "source",
    ["import torch, sklearn\ntorch.optim.SGD", "import timm", "from torch import optim", "import sklearn, skorch"],
)
def test_programs_for_torch_go_on_as_before(source: str, tmp_path: Path) -> None:
    from paceline.cli.run.options import ProgramOptions
    from paceline.cli.run.program import find
    from paceline_plugins.zero.run_option import serves

    script = tmp_path / "train.py"
    script.write_text(source)
    assert serves(find(script), ProgramOptions(), 4)
    script.write_text("import keras")
    assert not serves(find(script), ProgramOptions(), 1)


@pytest.mark.slow
@pytest.mark.processes
def test_copies_that_nobody_wished_end_with_an_exit_code(tmp_path: Path) -> None:
    done = paceline_run(tmp_path, "print('done')", "--workers", "2", "--rule", "bmuf")
    text = " ".join(done.stderr.replace("│", " ").split())
    assert text.startswith("train.py does not use torch, as far as its imports show") and "takes it as a torch" in text
    assert done.returncode == 1 and "each of the 2 workers did the whole job by itself" in text
    assert "The rule bmuf was never used" in text and "docs/guide/frameworks.md" in text
    assert "--force-zero-lines" in text
    assert paceline_run(tmp_path, "print('done')", "--overwrite", "--workers", "2", "--as-is").returncode == 0
    assert paceline_run(tmp_path, "print('done')", "--overwrite", "--workers", "1").returncode == 0


ADVERSARIES = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=4, shuffle=True)
    critic, artist = nn.Linear(6, 1), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 6))
    MADE
    for (x,) in loader:
        made = artist(torch.randn(len(x), 2))
        of_critic.zero_grad()
        (critic(made.detach()).mean() - critic(x).mean()).backward()
        of_critic.step()
        of_artist.zero_grad()
        critic(made).mean().neg().backward()
        of_artist.step()
"""
MADE = ("of_artist = torch.optim.Adam(artist.parameters())", "of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)")


def test_a_block_that_ends_between_forward_and_backward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer that was made last steps first, while a graph through the other model waits for its own step."""
    monkeypatch.setenv("PACELINE_RULE", "bmuf(period=3)")
    with pytest.raises(Refusal, match=r"train.py:\d+: .*Of Adam, SGD, .*\(SGD\) closes a minibatch"):
        virtual(tmp_path, ADVERSARIES.replace("MADE", "; ".join(MADE)))
    (tmp_path / "other").mkdir()
    virtual(tmp_path / "other", ADVERSARIES.replace("MADE", "; ".join(reversed(MADE))))


BY_HAND = """
    import torch
    from pathlib import Path

    weight = torch.zeros(3, requires_grad=True)
    for number in range(40):
        Path(f"steps").write_text(str(number))
        (weight - 1).square().sum().backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
            weight.grad = None
"""


def test_a_program_that_steps_by_hand_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match=r"train.py:8: the program computes gradients and has made no optimizer"):
        virtual(tmp_path, BY_HAND)
    assert (tmp_path / "steps").read_text() == "9"
    virtual(tmp_path, BY_HAND, workers=1)
    assert (tmp_path / "steps").read_text() == "39"


def test_a_program_that_trains_nothing_here_is_refused_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match=r"train.py: no optimizer of torch trained anything in this process"):
        virtual(tmp_path, "import torch\nprint(torch.zeros(2).sum())")
    virtual(tmp_path, "import sys, torch\nsys.argv.append('--help')\nraise SystemExit(0)")


def test_a_group_of_the_programs_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ), sys.argv
    with pytest.raises(Refusal, match=r"train.py:3: the program starts torch.distributed itself"):
        virtual(tmp_path, "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n")
    assert (dict(os.environ), sys.argv) == before
