# SPDX-License-Identifier: Apache-2.0
"""A second, slow momentum that is averaged at exchanges, under `bmuf_adam`: what it is worth on the characters.

    u      <- c u + (1 - c) g                                 on each worker; at exchanges u = mean_i u_i
    step    =  rate ((1 - w) m + w u) / (sqrt(v) + eps)       m: Adam's own moment; all with their bias corrected

Source: MT-DAO, arXiv 2510.05361. Where we differ: Adam's own first moment, with a beta1 of 0.5 and compensated, stands
for its fast one. Workers are stacked, so the optimizer itself sees all of them and averages u where a block ends.

    python records/2026-11-23_block_options/slow_momentum.py FOLDER [--minibatches 32768] [--workers 16 64] [--seed 0]

writes FOLDER/slow_momentum.json: for each N the held-out loss without (`w` = 0), and with.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

sys.path.extend(str(Path(__file__).resolve().parents[2] / "benchmarks" / folder) for folder in ("quality", "common"))
from _quality_tasks import TASKS, start
from block_options import _together

from paceline.rules.schedule.growth import rate_factor
from paceline_plugins.forecast import simulate_stacked
from paceline_plugins.forecast.vectorised import vectorised

SETTINGS = ((0.0, 0.0), (0.5, 0.9), (0.5, 0.99), (0.9, 0.99), (0.5, 0.999))
"""w and c."""


class SlowAdam(Adam):
    """Adam with a slow momentum beside its own, over stacked parameters of shape (N, ..)."""

    w = c = 0.0
    period = 8

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = {p: p.grad.clone() for group in self.param_groups for p in group["params"]}
        before = {p: p.clone() for p in gradients}
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self._add_slow(p, gradients[p], before[p], float(group["lr"]), group["eps"], group["betas"][1])

    def _add_slow(self, p: Tensor, gradient: Tensor, before: Tensor, rate: float, eps: float, beta2: float) -> None:
        state = self.state[p]
        slow, steps = state.setdefault("slow", torch.zeros_like(p)), state.setdefault("slow_steps", 0) + 1
        state["slow_steps"] = steps
        slow.mul_(self.c).add_(gradient, alpha=1 - self.c)
        deviation = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(eps)
        p.lerp_(before - rate * (slow / (1 - self.c**steps)) / deviation, self.w)
        if steps % self.period == 0:
            slow.copy_(slow.mean(0, keepdim=True).expand_as(slow))


def train(workers: int, minibatches: int, seed: int, w: float, c: float, folder: Path) -> float:
    """The held-out loss of a training."""
    task = TASKS["chars-adam"]
    model, plain = start(task, seed)
    group = plain.param_groups[0]
    SlowAdam.w, SlowAdam.c, SlowAdam.period = w, c, task.period
    optimizer = SlowAdam(model.parameters(), lr=group["lr"], betas=group["betas"], eps=group["eps"])
    found = simulate_stacked(
        model,
        task.loss,
        optimizer if w else plain,
        f"{task.recipe}(period={task.period})",
        _together(task.batches(folder, minibatches, seed), workers),
        rate=lambda step: rate_factor(workers) * task.factor((step + 0.5) * workers / minibatches),
        largest_gradient=task.largest_gradient,
    )
    model.load_state_dict(found.parameters, strict=False)
    return float(task.judge(model, folder))


def main() -> None:
    """Train, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minibatches", type=int, default=32_768)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path("out/block_options"), help="where prepared text is kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.data.mkdir(parents=True, exist_ok=True)
    vectorised.AdamW = SlowAdam  # the simulator stacks only what it knows to be element-wise
    rows = []
    for workers in args.workers:
        for w, c in SETTINGS:
            loss = train(workers, args.minibatches, args.seed, w, c, args.data)
            rows.append({"workers": workers, "w": w, "c": c, "loss": round(loss, 4)})
            print(json.dumps(rows[-1]), flush=True)
    (args.folder / "slow_momentum.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
