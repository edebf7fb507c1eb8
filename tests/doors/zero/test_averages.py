# SPDX-License-Identifier: Apache-2.0
"""Averages of the model that a program makes itself, once a step or once a pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.doors.zero.test_models import run

DECAY = 0.9
SOURCE = """
    optimizer, xs, means = torch.optim.SGD(model.parameters(), lr=0.02), [], []
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    frozen, average, equal = copy.deepcopy(model), copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    ready = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    @torch.no_grad()
    def update():
        for a, p in zip(average.parameters(), model.parameters()):
            a.data.mul_(0.9).add_(p.data, alpha=0.1)
        ready.update_parameters(model)
        xs.append(torch.nn.utils.parameters_to_vector(model.parameters()))

    for _ in range(6):
        train(optimizer, update)
        equal.update_parameters(model)
        means.append(xs[-1])
    vectors = [torch.nn.utils.parameters_to_vector(one.parameters()) for one in (average, ready, equal, frozen)]
    torch.save([start, xs, means, *[one.detach() for one in vectors]], "saved.pt")
"""


@pytest.mark.parametrize("workers", [2, 4])
def test_an_average_made_once_a_step_forgets_as_with_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    for path in run(tmp_path, monkeypatch, SOURCE, "sync", workers):
        start, xs, means, average, ready, equal, frozen = torch.load(path)
        wanted, plain = start, start
        for x in xs:
            wanted, plain = torch.lerp(x, wanted, DECAY**workers), torch.lerp(x, plain, DECAY)
        apart = (wanted - plain).norm()
        assert (average - wanted).norm() < 0.2 * apart and (ready - wanted).norm() < 0.2 * apart
        assert torch.allclose(equal, torch.stack(means).mean(0)) and torch.equal(frozen, start)
    said = capsys.readouterr().err
    assert said.count(f"counts as {workers} updates, so its decay 0.9 becomes {DECAY**workers:.4g}") == 1
