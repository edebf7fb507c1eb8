# SPDX-License-Identifier: Apache-2.0
"""What the tables of `lines.py` and `speech.py` have in common: how readers are trained, judged and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from _ctc import edits
from _permutations import pieces
from _trainings import rows_of
from torch import Tensor, nn

from paceline.errors import NonFiniteError
from paceline_plugins.forecast import simulate_stacked

LARGEST_GRADIENT = 1.0
WARM, LEVEL, LEAST = 0.05, 0.4, 0.01
POINTS = 64  # of a training's curve
CHUNK = 64  # minibatches that are made at once; the number of workers divides it

Row = dict[str, Any]
Loss = Callable[..., Tensor]
Take = Callable[[Tensor, torch.Generator], Sequence[Tensor]]
Given = Iterable[Sequence[Tensor]]
"""Steps of N workers: tensors (N, B, ...)."""


def factor(done: float) -> float:
    """Share of the highest rate at a share of the samples: up over 5 %, level to 40 %, then down to 1 %."""
    if done < LEVEL:
        return min(1.0, (done + 0.001) / WARM)
    return LEAST + (1 - LEAST) * (1 - done) / (1 - LEVEL)


def curve(losses: Tensor) -> list[float]:
    """Mean losses of POINTS equal parts of a training, or of each step where there are fewer."""
    return [float(part.mean()) for part in losses.tensor_split(min(POINTS, len(losses)))]


# ---- Minibatches


def chunks(samples: int, count: int, batch: int, workers: int, seed: int, take: Take) -> Iterator[list[Tensor]]:
    """CHUNK minibatches at a time, tensors (CHUNK / N, N, B, ...): a step of N workers after another.

    Minibatch number `step * N + worker` of `count` is the same one whatever N is. Every pass over the samples has an
    order of its own. `count` and CHUNK are whole multiples of CHUNK and N.

    Args:
        samples: how many there are.
        count: minibatches of all workers.
        batch: samples of a minibatch.
        workers: N.
        seed: of the order and of the dice.
        take: gives the samples of these places, made dirty with the dice.
    """
    if count % CHUNK or CHUNK % workers:
        raise SystemExit(
            f"{count} minibatches on {workers} workers: give a multiple of {CHUNK}, and workers that divide {CHUNK}"
        )
    places = pieces(samples, CHUNK * batch, seed)
    for chunk, mine in zip(range(count // CHUNK), places, strict=False):
        dice = torch.Generator().manual_seed((seed + 1) * 1_000_003 + chunk)
        yield [tensor.unflatten(0, (CHUNK // workers, workers, batch)) for tensor in take(mine, dice)]


# ---- Trainings


def trained(folder: Path, names: Sequence[str], seeds: int, jobs: int) -> list[Row]:
    """What came out of all of them, with each seed; seeds outermost, so that a whole table is there early."""
    return rows_of(folder, [(name, seed) for seed in range(seeds) for name in names], jobs)


def make_step(
    loss_of: Loss, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Iterable[Tensor], step: int, steps: int
) -> Tensor:
    """A worker's step number `step` of `steps`; its loss."""
    group = optimizer.param_groups[0]
    group["lr"] = group.setdefault("highest", group["lr"]) * factor(step / steps)
    optimizer.zero_grad()
    loss = loss_of(model, *batch)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
    optimizer.step()
    if not torch.isfinite(loss):
        raise NonFiniteError(f"the loss is {float(loss)} at step {step}; lower the learning rate")
    return loss.detach()


def large_minibatches(
    loss_of: Loss, model: nn.Module, optimizer: torch.optim.Optimizer, given: Given, steps: int
) -> Tensor:
    """One worker, and N synchronous ones: the mean of their gradients is that of all their samples together.

    Returns the loss of each step.
    """
    losses = [
        make_step(loss_of, model, optimizer, [tensor.flatten(0, 1) for tensor in batch], step, steps)
        for step, batch in enumerate(given)
    ]
    return torch.stack(losses)


def stacked(
    loss_of: Loss, model: nn.Module, optimizer: torch.optim.Optimizer, rule: str, given: Given, steps: int
) -> Tensor:
    """N workers under a rule by which all exchange together; the model becomes the global one.

    Returns the mean loss of each step.
    """
    result = simulate_stacked(
        model,
        loss_of,
        optimizer,
        rule,
        given,
        rate=lambda step: factor(step / steps),
        largest_gradient=LARGEST_GRADIENT,
    )
    model.load_state_dict(result.parameters)
    return result.losses.mean(1)


# ---- What came out


def error_rate(found: Sequence[list[int]], truths: Sequence[list[int]]) -> float:
    """Edits over what there is to read."""
    return sum(edits(*pair) for pair in zip(found, truths, strict=True)) / sum(map(len, truths))


def best_rate(tuned: Sequence[Row]) -> tuple[float, dict[float, float]]:
    """The rate that reads the tuning samples best, and the error of each; said, too."""
    tuning: dict[float, float] = {row["rate"]: row["tuning_error"] for row in tuned}
    rate = min(tuning, key=lambda tried: tuning[tried])
    for tried, error in tuning.items():
        print(f"serial, rate {tried:g}: {100 * error:.2f} % of the tuning samples{' (taken)' if tried == rate else ''}")
    return rate, tuning


def cells_of(rows: Sequence[Row]) -> list[Row]:
    """The table: a method and a number of workers over the seeds."""
    cells: list[Row] = []
    for method, workers in dict.fromkeys((row["method"], row["workers"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["workers"]) == (method, workers)]
        errors = [row["error"] for row in mine]
        cell = {"method": method, "workers": workers, "error": mean(errors), "least": min(errors), "most": max(errors)}
        cell["diverged"] = sum("diverged" in row for row in mine)
        took = [row["minibatch_ms"] for row in mine if "minibatch_ms" in row]
        cell["minibatch_ms"] = mean(took) if took else None
        if "word_error" in mine[0]:
            cell["word_error"] = mean(row["word_error"] for row in mine)
        cells.append(cell)
    return cells
