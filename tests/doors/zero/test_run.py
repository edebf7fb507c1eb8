# SPDX-License-Identifier: Apache-2.0
"""`paceline run` on programs that have never heard of paceline: real workers, and what a person sees of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.helpers import same_bits
from tests.paths import python_path

pytestmark = pytest.mark.plugins

DEADLINE_S = 170.0

PROGRAM = """
    import os
    import shutil
    import sys
    import tempfile
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    print("arguments", sys.argv[1:], __name__, flush=True)
    print("a remark", file=sys.stderr)
    torch.manual_seed(0)
    x = torch.arange(24.0).reshape(24, 1) / 24
    training = DataLoader(TensorDataset(torch.arange(24), x, 2 * x), batch_size=2, shuffle=True)
    held_out = DataLoader(TensorDataset(x, 2 * x), batch_size=24)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        model.train()
        seen = []
        for numbers, a, b in training:
            seen += numbers.tolist()
            optimizer.zero_grad()
            (model(a) - b).square().mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = sum((model(a) - b).square().mean().item() for a, b in held_out)
        with open("seen.txt", "a") as file:
            print(*seen, file=file)
        print("length", len(training), "loss", loss, flush=True)
    torch.save(model.state_dict(), "model.pt")
    back = torch.load("model.pt")
    with open("loss.txt", "w") as file:
        model.load_state_dict(back)
        print((model(x) - 2 * x).square().mean().item() == loss, file=file)
    own = tempfile.mkdtemp(dir=os.environ["TORCH_HOME"])
    for name in ("seen.txt", "loss.txt", "model.pt"):
        shutil.copy(name, own)
"""


def shared(folder: Path) -> Path:
    """A folder in which each worker's files stay: a cache of a library."""
    return folder.with_name(f"{folder.name}-shared")


def places(folder: Path) -> list[Path]:
    """What each worker wrote, rank 0 first; the run itself keeps nothing of the other workers' files."""
    assert not [name for name in ("door", "files") if (folder / "logs" / name).exists()]
    seen = (folder / "seen.txt").read_text()
    own = sorted(shared(folder).iterdir(), key=lambda place: (place / "seen.txt").read_text() != seen)
    return [folder, own[1]]


def paceline_run(folder: Path, source: str, *options: str, by: str = "run") -> subprocess.CompletedProcess[str]:
    shared(folder).mkdir(exist_ok=True)
    (folder / "train.py").write_text(textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, "-m", "paceline", by, "--log", "logs", *options, "train.py", "--rate", "3"],
        cwd=folder,
        env={"PYTHONPATH": python_path(), "PATH": "/usr/bin:/bin", "COLUMNS": "200", "TORCH_HOME": str(shared(folder))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.claim
@pytest.mark.processes
def test_an_unchanged_program_on_two_workers(tmp_path: Path) -> None:
    done = paceline_run(tmp_path, PROGRAM, "--workers", "2", "--rule", "averaging(period=4)")
    assert done.returncode == 0, done.stderr
    first, *epochs = done.stdout.splitlines()
    assert first == "arguments ['--rate', '3'] __main__"  # once, as the program prints it
    assert [line.split()[:2] for line in epochs] == [["length", "6"]] * 2
    losses = [float(line.split()[-1]) for line in epochs]
    assert losses[1] < losses[0]
    first, remark, ended, few, _, logs = done.stderr.splitlines()
    assert few.startswith("warning: 4 blocks in all: too few for 2 workers")
    assert (first, remark) == ("starting 2 workers of train.py", "a remark") and logs.startswith("logs: logs; see")
    assert ended.startswith("2 workers finished: loss 0.") and " samples/s), efficiency " in ended
    said = (tmp_path / "logs" / "output" / "rank-000.err").read_text()
    assert "paceline: 2 workers under averaging(period=4): Linear (2 trained numbers) and its SGD" in said
    rows = list(enumerate(PROGRAM.splitlines(), 1))
    line = {part: number for number, text in rows for part in ("in training", "in held_out") if part in text}
    assert f"train.py:{line['in training']}: 24 samples, for training: split among 2 workers" in said
    assert f"train.py:{line['in held_out']}: 24 samples, for evaluation: all of them, on every worker" in said

    seen = [
        [int(n) for n in line.split()]
        for place in places(tmp_path)
        for line in (place / "seen.txt").read_text().splitlines()
    ]
    for epoch in (0, 1):
        assert sorted(seen[epoch] + seen[2 + epoch]) == list(range(24))
    assert same_bits(*[torch.load(place / "model.pt", weights_only=True) for place in places(tmp_path)])
    assert [(place / "loss.txt").read_text() for place in places(tmp_path)] == ["True\n"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "loss.txt", "model.pt", "seen.txt", "train.py"]


@pytest.mark.processes
def test_virtual_workers_are_real_ones(tmp_path: Path) -> None:
    """`paceline sim` around the same program: what is printed, written and seen, to the last digit."""
    options = "--workers", "2", "--rule", "averaging(period=4, reproducible=True)"
    found = {}
    for by in ("run", "sim"):
        here = tmp_path / by
        here.mkdir()
        done = paceline_run(here, PROGRAM, *options, by=by)
        assert done.returncode == 0, done.stderr
        assert "24 samples, for training: split among 2 workers" in (here / "logs/output/rank-000.err").read_text()
        files = [(place / name).read_text() for place in places(here) for name in ("seen.txt", "loss.txt")]
        found[by] = done.stdout.splitlines(), files
        assert same_bits(*[torch.load(place / "model.pt", weights_only=True) for place in places(here)])
    assert found["run"] == found["sim"]
    assert found["sim"][0][0] == "arguments ['--rate', '3'] __main__" and len(found["sim"][0]) == 3


@pytest.mark.processes
def test_a_refusal_names_the_place_and_the_lines_to_add(tmp_path: Path) -> None:
    source = """
        import torch
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters())
        for x in torch.arange(24.0).reshape(12, 2, 1):
            model(x).square().mean().backward()
            optimizer.step()
    """
    done = paceline_run(tmp_path, source, "--workers", "2")
    assert done.returncode == 1
    text = " ".join(done.stderr.replace("│", " ").split())
    assert "train.py:7: Adam steps, and no DataLoader was gone through in training that could be split" in text
    assert "run = paceline.attach(model, optimizer)" in text and "for batch in run.share(batches):" in text
    assert "attachment.py" not in text  # only the program's own lines
