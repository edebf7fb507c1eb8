# SPDX-License-Identifier: Apache-2.0
"""Training scripts as people write them, under asynchronous rules in virtual workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from tests.helpers import same_bits
from tests.update.server.programs import finite, uneven

SCRIPT = '''
"""Gradient accumulation, clipping, OneCycleLR, an averaged copy, evaluation in the middle, a checkpoint of its own."""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--rule", default="asgd")
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def main():
    torch.manual_seed(7)
    x = torch.randn(480, 8)
    y = (x @ torch.randn(8, 3)).argmax(1)
    training, held_out = random_split(TensorDataset(x, y), [400, 80])
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    run = paceline.attach(model, optimizer, args.rule)
    loader = run.share(DataLoader(training, batch_size=8, shuffle=True), even=True)
    valid = DataLoader(held_out, batch_size=20)
    steps = args.epochs * (-(-len(loader) // args.accumulate))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=steps)
    ema = copy.deepcopy(model)
    accuracies, rates = [], []
    for epoch in range(args.epochs):
        optimizer.zero_grad()
        for number, (inputs, targets) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(inputs), targets) / args.accumulate
            loss.backward()
            if (number + 1) % args.accumulate == 0 or number + 1 == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                rates.append(schedule.get_last_lr()[0])
                with torch.no_grad():
                    for average, parameter in zip(ema.parameters(), model.parameters()):
                        average.lerp_(parameter, 0.1)
        own = {name: value.clone() for name, value in model.state_dict().items()}
        with run.global_model() as whole:
            accuracies.append(evaluate(whole, valid))
        assert all(torch.equal(own[name], value) for name, value in model.state_dict().items())
    run.close()
    return model.state_dict(), ema.state_dict(), accuracies + [evaluate(model, valid)], rates, run.minibatches, steps


if __name__ == "__main__":
    final, averaged, accuracies, rates, minibatches, steps = main()
'''

RULES = ["asgd", "asgd(period=4)", "ssp(staleness=2)", "dc_asgd(kind='adaptive')", "easgd(period=4)", "bmuf"]


@pytest.mark.parametrize("rule", RULES[:-1])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_users_script(rule: str, accumulate: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    torch.manual_seed(0)
    found: list[Any] = paceline.simulate(
        script, 3, ["--rule", rule, "--accumulate", str(accumulate), "--epochs", "5"], clock=uneven()
    )
    for one in found:
        assert same_bits(one["final"], found[0]["final"]) and finite(one["averaged"])
        assert one["minibatches"] == one["steps"] == len(one["rates"])
        assert max(one["rates"]) > 0.019 and one["rates"][-1] < 2e-4
        assert one["accuracies"][-1] > 0.75 and min(one["accuracies"][2:]) > 0.5


def test_the_script_alone_is_the_same_whatever_the_asynchronous_rule(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    ends = []
    for rule in RULES:
        torch.manual_seed(0)
        found: list[Any] = paceline.simulate(script, 1, ["--rule", rule])
        ends.append(found[0]["final"])
    assert all(same_bits(end, ends[-1]) for end in ends)
