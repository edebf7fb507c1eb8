# SPDX-License-Identifier: Apache-2.0
"""Blocks that end by time, among virtual workers of unequal speed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.rules.schedule import uneven

N, SAMPLES, BATCH = 4, 1003, 4
SLOW = [1.0, 1.0, 1.0, 5.0]
Compute = Sequence[float] | Callable[..., float]


class Trained:
    """What one worker has seen, and where it came to.

    Args:
        step: a checkpoint to go on from.
        calls: called after each step with its number.
        settings: of `attach`.
    """

    def __init__(
        self,
        rule: str,
        epochs: int = 2,
        adam: bool = False,
        step: Path | None = None,
        calls: Callable[[paceline.Run, int], None] | None = None,
        even: bool = False,
        **settings: Any,
    ) -> None:
        self.rule, self.epochs, self.adam, self.step, self.settings = rule, epochs, adam, step, settings
        self.calls, self.even = calls, even

    def __call__(self) -> dict[str, Any]:
        torch.manual_seed(1)
        x = torch.randn(SAMPLES, 6)
        data = TensorDataset(x, x.sin().sum(1, keepdim=True), torch.arange(SAMPLES))
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        kind: Any = torch.optim.Adam if self.adam else torch.optim.SGD
        optimizer, loader = kind(model.parameters(), lr=0.02), DataLoader(data, BATCH, shuffle=True)
        seen = [list[int]() for _ in range(self.epochs)]
        with paceline.attach(model, optimizer, self.rule, **self.settings) as run:
            steps = self.epochs * len(run.share(loader, self.even))
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, steps)
            run.include(schedule=schedule)
            if self.step is not None:
                run.resume(self.step)
            for epoch in range(run.epoch, self.epochs):
                for inputs, targets, numbers in run.share(loader):
                    optimizer.zero_grad()
                    F.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    schedule.step()
                    seen[epoch] += numbers.tolist()
                    if self.calls is not None:
                        self.calls(run, run.minibatches)
            made, rate = run.minibatches, optimizer.param_groups[0]["lr"]
        return {"seen": seen, "made": made, "rate": rate, "model": [p.detach() for p in model.parameters()]}


def go(program: Trained, compute: Compute, workers: int = N) -> list[dict[str, Any]]:
    clock = paceline.Clock(compute=compute, network=1e-4)
    outs = [out for out in paceline.simulate(program, workers, clock=clock) if out is not None]
    for epoch in range(program.epochs):
        assert sorted(number for out in outs for number in out["seen"][epoch]) == list(range(SAMPLES))
    assert all(same(out, outs[0]) for out in outs)
    return outs


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one["model"], other["model"], strict=True))


RULES = {
    "bmuf(period=8, even=False)": False,
    "bmuf(period=16, even=False, overlap=4)": False,
    "bmuf_adam(period=8, even=False)": True,
    "diloco(period=8, even=False)": False,
    "auto": True,
}


@pytest.mark.parametrize("rule", list(RULES))
def test_a_slow_worker_makes_fewer_minibatches_and_every_sample_comes_once(rule: str) -> None:
    outs = go(Trained(rule, adam=RULES[rule]), SLOW)
    made = [out["made"] for out in outs]
    assert max(made[:3]) - min(made[:3]) <= 8 and made[3] < 0.35 * made[0]
    assert max(m * c for m, c in zip(made, SLOW, strict=True)) < 0.55 * 5 * SAMPLES / BATCH / 4 * 2
    assert all(out["rate"] < 1e-4 for out in outs), "each worker's schedule comes to its end"


@pytest.mark.parametrize("rule", ["bmuf(period=4, even={})", "bmuf_adam(period=4, overlap=2, even={})"])
def test_workers_of_equal_speed_train_as_in_even_blocks(rule: str) -> None:
    outs = [go(Trained(rule.format(even), adam="adam" in rule), [1.0, 1.02, 0.98], 3)[0] for even in (True, False)]
    assert same(*outs)


def test_a_worker_that_becomes_slower_gets_fewer_within_the_epoch() -> None:
    def compute(rank: int, step: int, dice: Any) -> float:
        return 4.0 if rank == 0 and step >= 20 else 1.0

    made = [out["made"] for out in go(Trained("bmuf(period=4, even=False)", epochs=1), compute, 2)]
    assert made[0] < 0.75 * made[1] and sum(made) == -(-SAMPLES // BATCH)


@pytest.mark.parametrize("workers", [4, 3])
def test_a_run_goes_on_from_within_an_epoch_of_unequal_shares(tmp_path: Path, workers: int) -> None:
    """With as many workers to the same bits; with others the rest is dealt anew."""
    rule = "bmuf(period=4, even=False)"
    whole = go(Trained(rule, checkpoint=tmp_path, every_blocks=5, keep=99), SLOW)
    step = sorted(tmp_path.glob("step-*"))[1]
    clock = paceline.Clock(compute=SLOW[-workers:], network=1e-4)
    outs = [out for out in paceline.simulate(Trained(rule, step=step), workers, clock=clock) if out is not None]
    later = [number for out in outs for number in out["seen"][0]]
    assert len(set(later)) == len(later) == SAMPLES - BATCH * 10 * 16
    if workers == N:
        assert same(whole[0], outs[0])


@pytest.mark.parametrize("every", [3, 10, 37, 60])
@pytest.mark.parametrize("rule", ["auto", "bmuf(period=8, even=False)", "bmuf_adam(period=16, even=False, overlap=4)"])
def test_a_program_that_calls_all_workers_by_its_steps_gets_even_blocks(rule: str, every: int, tmp_path: Path) -> None:
    """Its calls fit together, though blocks had begun to end by time."""
    found = list[list[int]]()

    def calls(run: paceline.Run, step: int) -> None:
        if step % every == 0:
            run.save(tmp_path / "saved")
            found.append(run.messages.gather(step))

    outs = go(Trained(rule, adam="bmuf(" not in rule, calls=calls), SLOW)
    assert found == [[at] * N for at in range(every, outs[0]["made"] + 1, every) for _ in range(N)]
    assert len({out["made"] for out in outs}) == 1 and all(out["rate"] < 1e-4 for out in outs)


def test_calls_passes_apart_are_refused() -> None:
    def calls(run: paceline.Run, step: int) -> None:
        if step % 300 == 0:
            run.messages.barrier()

    with pytest.raises(paceline.PacelineError, match=r"calls all others within a pass.*auto\(even=True\)"):
        go(Trained("bmuf(period=8, even=False)", epochs=9, calls=calls), SLOW)


def test_a_program_that_asks_for_equal_shares_gets_them() -> None:
    assert len({out["made"] for out in go(Trained("auto", adam=True, even=True), SLOW)}) == 1


def test_the_mean_counts_models_by_their_minibatches() -> None:
    """Each worker's gradient is a constant, so that n minibatches at rate r move it by -r n times that."""
    found = []

    def train() -> list[float]:
        weight = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(weight.weight)
        optimizer, values = torch.optim.SGD(weight.parameters(), lr=1.0), list[float]()
        with paceline.attach(weight, optimizer, "averaging(period=2, even=False)") as run:
            for _ in run.share(DataLoader(TensorDataset(torch.ones(80)))):
                optimizer.zero_grad()
                (weight.weight * (1.0 + run.world.rank)).sum().backward()
                optimizer.step()
                values.append(weight.weight.item())
        return values

    found = paceline.simulate(train, 2, clock=paceline.Clock(compute=[1.0, 3.0], network=1e-4))
    late = {round(b - a, 4) for a, b in zip(found[1][-12:-2], found[1][-11:-1], strict=True)}
    assert late == {round(-(3 * 3 * 1.0 + 1 * 1 * 2.0) / 4, 4)}, "of three and one minibatches"


@pytest.mark.parametrize("seconds", [(1, 1, 1, 5), (1, 1.25, 2, 5), (3, 1), (1, 1.1, 9)])
@pytest.mark.parametrize("period", [1, 2, 5])
def test_no_other_whole_numbers_end_sooner(seconds: tuple[float, ...], period: int) -> None:
    found, total = uneven.periods(seconds, period), len(seconds) * period
    every = (one for one in product(range(1, total + 1), repeat=len(seconds)) if sum(one) == total)
    least = min(max(n * c for n, c in zip(one, seconds, strict=True)) for one in every)
    assert sum(found) == total and max(n * c for n, c in zip(found, seconds, strict=True)) == pytest.approx(least)
    assert uneven.effective(found) <= len(seconds) and uneven.effective([7] * 4) == 4


@pytest.mark.full
@pytest.mark.parametrize("seed", range(24))
def test_passes_calls_and_checkpoints_fit_together(seed: int, tmp_path: Path) -> None:
    """Wherever workers of unequal speed end their passes, take checkpoints and call each other."""
    dice = random.Random(seed)
    speeds = [dice.choice([1.0, 1.0, 1.5, 2.0, 3.0, 5.0]) for _ in range(dice.randint(2, 5))]
    period = dice.choice([3, 4, 8, 12])
    overlap = dice.choice(["", f", overlap={dice.randint(1, period)}"])
    rule, every = f"{dice.choice(['bmuf', 'averaging'])}(period={period}, even=False{overlap})", dice.choice([0, 7, 20])

    def calls(run: paceline.Run, step: int) -> None:
        if every and step % every == 0:
            run.messages.barrier()

    go(Trained(rule, calls=calls, checkpoint=tmp_path, every_blocks=1), speeds, len(speeds))
    newest = max(tmp_path.glob("step-*"))
    clock = paceline.Clock(compute=speeds, network=1e-4)
    outs = [out for out in paceline.simulate(Trained(rule, step=newest), len(speeds), clock=clock) if out is not None]
    for epoch in range(2):
        later = [number for out in outs for number in out["seen"][epoch]]
        assert len(set(later)) == len(later)
