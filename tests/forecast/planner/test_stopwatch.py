# SPDX-License-Identifier: Apache-2.0
"""The stopwatch: its hook in this process, and a script in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline_plugins.forecast.planner import stopwatch
from paceline_plugins.forecast.planner.stopwatch import StopwatchError, Timed, _Hook, time_script

SCRIPT = """
import sys
import torch
from torch import nn

net = nn.Linear(3, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(int(sys.argv[1])):
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
"""


def stepped(hook: _Hook, steps: int) -> None:
    """Adam on a model of which a part does not learn, and another optimizer in turn."""
    net, other = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)
    net.bias.requires_grad_(False)
    optimizers = [torch.optim.Adam(net.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)]
    for _ in range(steps):
        other(net(torch.ones(1, 3))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            hook(optimizer, (), {})


def test_the_hook_measures_and_counts() -> None:
    hook = _Hook(steps=20)
    stepped(hook, 10)
    found = hook.found()
    assert found is not None and len(found.times_s) == 10 - 1 - 3 and min(found.times_s) > 0
    assert found.shapes == ((2, 3), (2, 2)) and found.moments == 2


def test_it_ends_the_program_when_it_has_enough() -> None:
    hook = _Hook(steps=4)
    with pytest.raises(SystemExit):
        stepped(hook, 100)
    found = hook.found()
    assert found is not None and len(found.times_s) == 4


@pytest.mark.processes
def test_a_script_is_timed_and_left_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = time_script(script, ["100"], steps=5)
    assert isinstance(found, Timed) and len(found.times_s) == 5 and found.shapes == ((2, 3), (2,))
    assert found.moments == 1 and found.batches is None


def test_a_script_without_steps_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(command: list[str], environment: dict[str, str], said: Path, timeout_s: float) -> str:
        assert command[-2:] == ["train.py", "2"] and "RANK" not in environment
        said.write_text("loading\nno such file\n\n")
        return "ended with exit code 1"

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(stopwatch, "_finish", finish)
    with pytest.raises(StopwatchError, match=r"exit code 1.*made 6 steps.*no such file"):
        time_script(Path("train.py"), ["2"])
