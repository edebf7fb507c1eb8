# SPDX-License-Identifier: Apache-2.0
"""What `blocks.py` trains: methods, their rules and their learning rates.

A learning rate is constant at first and falls by 1000 over the last 60 % of the samples, under all methods alike. The
local optimizer's height is one number for one worker and one for all methods with blocks, whatever N is. Methods with
"best" in their name may choose theirs at every N, which ours may not: synchronous training because that is how it is
used, averaging because its constant gain of 1 leaves nothing else.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import SGD, Adam, Optimizer

CONSTANT = 0.4
"""Share of the samples that see the full rate."""
FALL = 1000.0
WARM = 5 / 90
"""Share of the samples over which a scaled rate rises from that of one worker: five epochs of ninety."""
SCALES = (0.25, 0.5, 0.75, 1.0)
"""Exponents s of the rates alone x N^s among which a method with "best" in its name chooses; 1 is linear scaling."""
RAMP = 0.2
"""Share of the blocks over which eta rises where it is ramped."""


@dataclass(frozen=True)
class Local:
    """A local optimizer.

    Attributes:
        alone: its learning rate on one worker.
        workers: its learning rate under methods with blocks.
        momentum: of SGD; None for Adam.
    """

    alone: float
    workers: float
    momentum: float | None = None


LOCAL = {"sgd": Local(0.5, 0.5, 0.0), "momentum": Local(0.025, 0.025, 0.9), "adam": Local(0.002, 0.002)}


@dataclass(frozen=True)
class Training:
    """One training, but for its seed.

    Attributes:
        workers: N.
        rule: as `paceline run --rule` takes it.
        rate: the local learning rate at its height.
        start: the rate from which it rises in the first steps, or None.
    """

    workers: int
    rule: str
    rate: float
    start: float | None = None

    @property
    def name(self) -> str:
        """Of its file; two trainings with one name are one."""
        parts = [f"N{self.workers}", re.sub(r"[^\w.]+", "_", self.rule).strip("_"), f"rate_{self.rate:.4g}"]
        parts += [] if self.start is None else [f"from_{self.start:.4g}"]
        return "-".join(parts)

    def optimizer(self, kind: str, model: nn.Module) -> Optimizer:
        """The local optimizer."""
        momentum = LOCAL[kind].momentum
        if momentum is None:
            return Adam(model.parameters(), lr=self.rate, fused=True)
        return SGD(model.parameters(), lr=self.rate, momentum=momentum)

    def factor(self, share: float) -> float:
        """Of the rate, when `share` of the samples has been seen."""
        low = 1.0 if self.start is None else self.start / self.rate
        rise = low + (1 - low) * min(1.0, share / WARM)
        return float(rise * FALL ** -max(0.0, (share - CONSTANT) / (1 - CONSTANT)))


Plan = dict[tuple[str, str], list[Training]]
"""(method, place) -> candidates, of which the best by the first seed stands for the method. A place is a column of a
table or a point of a curve: an N, a gain, a period."""


def text_of(recipe: str, **settings: object) -> str:
    """A rule in words."""
    return f"{recipe}({', '.join(f'{key}={value!r}' for key, value in settings.items())})"


class Methods:
    """The methods at one N.

    Args:
        args: the benchmark's.
        workers: N.
        period: minibatches of a block; None for the benchmark's.
    """

    def __init__(self, args: argparse.Namespace, workers: int, period: int | None = None) -> None:
        self.workers, self.local = workers, local_of(args)
        self.kind, self.steps = args.optimizer, args.minibatches // workers
        self.period = args.period if period is None else period
        self.warmup = round(args.warmup * self.steps)

    def block(self, recipe: str, **settings: object) -> Training:
        """A method with blocks."""
        if self.warmup:
            settings = {"warmup": self.warmup, **settings}
        return Training(self.workers, text_of(recipe, period=self.period, **settings), self.local.workers)

    def scaled(self, scale: float) -> float:
        """The rate alone x N^scale."""
        return self.local.alone * self.workers**scale

    def sync(self, scale: float) -> Training:
        """The mean gradient, with a scaled rate that rises to its height."""
        return Training(self.workers, "sync", self.scaled(scale), start=self.local.alone)

    def averaging(self) -> list[Training]:
        """At the rate of all methods with blocks, and at scaled ones."""
        plain = self.block("averaging")
        scaled = (replace(plain, rate=self.scaled(scale), start=self.local.alone) for scale in SCALES)
        return [plain, *scaled]

    def table(self) -> dict[str, list[Training]]:
        """All that are compared, by name."""
        ramp = max(1, round(RAMP * (self.steps - self.warmup) / self.period))
        found = {
            "sync_linear": [self.sync(1.0)],
            "sync_best": [self.sync(scale) for scale in SCALES],
            "averaging": self.averaging()[:1],
            "averaging_best": self.averaging(),
            "bmuf_paper": [self.block("bmuf", gain="paper")],
            "bmuf_paper_ramped": [self.block("bmuf", gain="paper", ramp=ramp)],
            "bmuf_paper_classical": [self.block("bmuf", gain="paper", nesterov=False)],
            "bmuf_paper_classical_ramped": [self.block("bmuf", gain="paper", nesterov=False, ramp=ramp)],
            "diloco_paper": [self.block("diloco", gain="paper")],
            "bmuf": [self.block("bmuf")],
        }
        if self.kind == "momentum":
            found["bmuf_compensated"] = [self.block("bmuf", local_state="compensate")]
        if self.kind == "adam":
            found["bmuf_adam"] = [self.block("bmuf_adam")]
            found["bmuf_adam_beta1_kept"] = [self.block("bmuf_adam", beta1=None)]
        return found


def local_of(args: argparse.Namespace) -> Local:
    """The local optimizer, with the rates of the command line where there are any."""
    known = LOCAL[args.optimizer]
    alone = known.alone if args.alone is None else args.alone
    return Local(alone, known.workers if args.rate is None else args.rate, known.momentum)


def serial(args: argparse.Namespace) -> Training:
    """One worker."""
    return Training(1, "sync", local_of(args).alone)


# ---- Plans


def table(args: argparse.Namespace) -> Plan:
    """Every method at every N."""
    plan: Plan = {("serial", "1"): [serial(args)]}
    for workers in args.workers:
        methods = Methods(args, workers).table() if workers > 1 else {}
        plan |= {
            (method, str(workers)): found
            for method, found in methods.items()
            if args.methods is None or method in args.methods
        }
    return plan


def gain(args: argparse.Namespace) -> Plan:
    """Ours at gains of N^p."""
    plan: Plan = {("serial", "1"): [serial(args)]}
    for workers in args.workers:
        at = Methods(args, workers)
        tried = [float(f"{workers**p:.4g}") for p in args.exponents] if workers > 1 else []
        plan |= {(f"N{workers}", f"{number:g}"): [at.block(args.recipe, gain=number)] for number in tried}
    return plan


def period(args: argparse.Namespace) -> Plan:
    """Ours and DiLoCo's published constants at every period."""
    plan: Plan = {("serial", "1"): [serial(args)]}
    (workers,) = args.workers
    for tau in args.periods:
        at = Methods(args, workers, tau)
        plan["ours", str(tau)] = [at.block(args.recipe)]
        plan["diloco_paper", str(tau)] = [at.block("diloco", gain="paper")]
    return plan


def rate(args: argparse.Namespace) -> Plan:
    """One worker, and ours, at several local rates."""
    plan: Plan = {}
    for workers in args.workers:
        at = Methods(args, workers)
        for height in args.rates:
            one = Training(1, "sync", height) if workers == 1 else replace(at.block(args.recipe), rate=height)
            plan[f"N{workers}", f"{height:g}"] = [one]
    return plan


PLANS = {"table": table, "gain": gain, "period": period, "rate": rate}
