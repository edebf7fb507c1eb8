# SPDX-License-Identifier: Apache-2.0
"""Evaluation on held-out pairs, and the check that a pair is warm enough for dual learning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from paceline import UnsupportedError
from paceline_dual.batches import collate
from paceline_dual.pair import DIRECTIONS, Direction, Pair
from paceline_dual.protocols import undisturbed
from paceline_dual.sequences import same_width, unpad
from paceline_dual.settings import Looks

SUMS = ("pairs", "forward", "backward", "prior_x", "prior_y", "gap", "gap_squared")
EXACT = ("right_forward", "asked_forward", "right_backward", "asked_backward")
Row = dict[str, Any]


def look(pair: Pair, heldout: Dataset[Any], looks: Looks, part: tuple[int, int] = (0, 1)) -> Tensor:
    """Sums over held-out pairs, in the order of `SUMS` and `EXACT`, float64; the parts' sums add up.

    Args:
        pair: dropout is off meanwhile.
        heldout: pairs (x, y).
        looks: pairs at a time, and the beam's width.
        part: (k, n) for the k-th of n workers.
    """
    mine = Subset(heldout, range(part[0], len(heldout), part[1]))  # type: ignore[arg-type]
    sums = torch.zeros(len(SUMS) + len(EXACT), dtype=torch.float64)
    with undisturbed(pair):
        for x, y in _batches(mine, looks.batch, pair.device):
            sums += torch.tensor(_sums(pair, x, y) + _exact(pair, x, y, looks.beam), dtype=torch.float64)
    return sums


def _batches(data: Dataset[Any], batch: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in DataLoader(data, batch, collate_fn=collate):
        yield x.to(device), y.to(device)


def _sums(pair: Pair, x: Tensor, y: Tensor) -> list[float]:
    there, back = pair.forward_model.log_prob(y, x).double(), pair.backward_model.log_prob(x, y).double()
    of_x, of_y = pair.prior_x.log_prob(x).double(), pair.prior_y.log_prob(y).double()
    gap = of_x + there - of_y - back
    return [float(len(x)), *(float(one.sum()) for one in (there, back, of_x, of_y, gap.abs(), gap**2))]


def _exact(pair: Pair, x: Tensor, y: Tensor, width: int) -> list[float]:
    """The number of right best outputs, and of outputs: 0 of 0 if a side is neither sequence nor label."""
    found: list[float] = []
    for source, target, model in ((x, y, pair.forward_model), (y, x, pair.backward_model)):
        if target.dtype != torch.int64:
            found += [0.0, 0.0]
            continue
        best = model.beam(source, width)[0][:, 0]
        found += [float(_same(best, target).sum()), float(len(target))]
    return found


def _same(a: Tensor, b: Tensor) -> Tensor:
    """Which rows are the same sequences or labels, [B]."""
    if a.dim() == 1:
        return a == b
    a, b = same_width([a, b])
    return (a == b).all(1)


def row_of(step: int, sums: Tensor, rewards: Tensor) -> Row:
    """A row of the history.

    Args:
        step: steps so far.
        sums: of all workers; see `look`.
        rewards: of all workers; see `Position.sums`.

    Returns:
        step; mean log P of the held-out pairs: forward log P(y | x), backward log P(x | y), prior_x and prior_y; mean
        |gap| and its root mean square as gap and gap_rms; shares of right best outputs as exact_forward and
        exact_backward (None if a side is neither sequence nor label); mean rewards of the samples since the last row:
        rewards[direction] with r1, r2 and r, None if there were none.
    """
    found = dict(zip((*SUMS, *EXACT), sums.tolist(), strict=True))
    pairs = found["pairs"]
    row: Row = {"step": step, **{name: found[name] / pairs for name in SUMS[1:6]}}
    row["gap_rms"] = (found["gap_squared"] / pairs) ** 0.5
    for name in DIRECTIONS:
        asked = found[f"asked_{name}"]
        row[f"exact_{name}"] = found[f"right_{name}"] / asked if asked else None
    row["rewards"] = {name: _means(one) for name, one in zip(DIRECTIONS, rewards.tolist(), strict=True)}
    return row


def _means(sums: list[float]) -> dict[str, float] | None:
    count = sums[0]
    return dict(zip(("r1", "r2", "r"), (one / count for one in sums[1:]), strict=True)) if count else None


# -- translations -----------------------------------------------------------------------------------


def translations(pair: Pair, heldout: Dataset[Any], looks: Looks, alpha: float) -> list[Row]:
    """Both models' outputs for the first held-out pairs.

    Returns:
        a dictionary for each pair and direction: direction, source, output, reference (a list of symbols, a label, or
        its shape), and the output's r1, r2 and r = alpha r1 + (1 - alpha) r2. A direction whose targets are neither
        sequences nor labels is left out.
    """
    count = min(looks.samples, len(heldout))  # type: ignore[arg-type]
    if not count:
        return []
    found: list[Row] = []
    with undisturbed(pair):
        for x, y in _batches(Subset(heldout, range(count)), count, pair.device):
            for name, source, target in ((DIRECTIONS[0], x, y), (DIRECTIONS[1], y, x)):
                if target.dtype == torch.int64:
                    found += _translated(pair.direction(name), source, target, looks.beam, alpha)
    return found


def _translated(direction: Direction, source: Tensor, target: Tensor, width: int, alpha: float) -> list[Row]:
    best = direction.primal.beam(source, width)[0][:, 0]
    r1, r2 = direction.prior_target.log_prob(best), direction.dual.log_prob(source, best)
    r = alpha * r1 + (1 - alpha) * r2
    columns = (_plain(source), _plain(best), _plain(target), r1.tolist(), r2.tolist(), r.tolist())
    names = ("source", "output", "reference", "r1", "r2", "r")
    return [{"direction": direction.name, **dict(zip(names, one, strict=True))} for one in zip(*columns, strict=True)]


def _plain(x: Tensor) -> list[Any]:
    """Rows as JSON."""
    if x.dtype == torch.int64:
        return cast("list[Any]", unpad(x) if x.dim() == 2 else x.tolist())
    shape = " x ".join(str(size) for size in x.shape[1:])
    return [f"{shape} numbers"] * len(x)


# -- the warm start ---------------------------------------------------------------------------------


def check_warm(row: Row, warm: int) -> None:
    """Raise UnsupportedError unless both models use their input.

    On held-out pairs log P(y | x) has to exceed log P(y), and log P(x | y) has to exceed log P(x). Else samples are
    unrelated to their source, and their rewards teach nothing.

    Args:
        row: of the history.
        warm: steps of the warm-up, for the message.
    """
    told = []
    sides = (("forward", "P(y | x)", "prior_y", "P(y)"), ("backward", "P(x | y)", "prior_x", "P(x)"))
    for name, what, prior, alone in sides:
        mine, other = row[name], row[prior]
        if not mine > other:
            told.append(f"the {name} model's mean log {what} is {mine:.4g}, the prior's log {alone} {other:.4g}")
    if told:
        raise UnsupportedError(
            f"the pair is not warm enough to learn from unlabelled data, after {warm} steps of warm-up: on held-out "
            f"pairs {'; '.join(told)}; a model that looks at its input is above its prior: give more warm steps (and "
            "another folder, or resume=False), a higher rate, or more labelled pairs"
        )
