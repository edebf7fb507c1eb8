# SPDX-License-Identifier: Apache-2.0
"""Which trainings `delay_compensation.py` makes."""

from __future__ import annotations

from collections.abc import Callable

from _stale_stack import HALVES, Row

MINIBATCHES, SHORT = 20_480, 4_096
RATE, WORKERS = 0.3, 8
FEW, MANY, RATE_OF_MANY = 4, 16, 0.2
BEST_ALONE, BEST_ASGD, BEST_COMPENSATED = 0.4, 0.15, 0.2
"""The best of the rates that were tried with seed 0 (`rates`)."""
ASGD = "asgd(overlap=0)"
TRIED = {"constant": (5.0, 10.0, 20.0), "adaptive": (1.0, 2.0, 4.0, 8.0), "normalized": (0.03, 0.1, 0.25, 0.5, 1.0)}
LIMITED = {"constant": (20.0, 40.0), "normalized": (0.5,)}
TUNED = {"constant": 10.0, "adaptive": 4.0, "normalized": 0.25}


def compensated(kind: str, strength: float, besides: str = "") -> str:
    """The rule as a user writes it."""
    return f"dc_asgd(kind='{kind}', strength={strength}{besides}, overlap=0)"


def _row(method: str, rule: str, seed: int, rate: float = RATE, workers: int = WORKERS) -> Row:
    return Row(method, workers, rate, rule, MINIBATCHES, seed)


def _kinds(seed: int, rate: float, workers: int) -> list[Row]:
    return [_row(kind, compensated(kind, best), seed, rate, workers) for kind, best in TUNED.items()]


def table(seed: int) -> list[Row]:
    """Everything at one rate; `asgd` and delay compensation at their own best, too."""
    found = [_row("one worker", "", seed, rate, 1) for rate in (RATE, BEST_ALONE)]
    found += [_row("asgd", ASGD, seed, rate) for rate in (RATE, BEST_COMPENSATED, BEST_ASGD, 0.1)]
    found += [_row("synchronous", "lockstep", seed), *_kinds(seed, RATE, WORKERS)]
    found += [_row("constant, limit", compensated("constant", LIMITED["constant"][-1], ", limit=1"), seed)]
    # from the first fall of the rate on, which is half of the training
    found += [_row(f"{k}, second half", compensated(k, best, ", start=0.5"), seed) for k, best in TUNED.items()]
    best = ("adaptive", "normalized")
    return found + [_row(kind, compensated(kind, TUNED[kind]), seed, BEST_COMPENSATED) for kind in best]


def few(seed: int) -> list[Row]:
    """Half as many workers."""
    return [_row("asgd", ASGD, seed, RATE, FEW), *_kinds(seed, RATE, FEW)]


def many(seed: int) -> list[Row]:
    """Twice as many workers."""
    found = [_row("one worker", "", seed, RATE_OF_MANY, 1), _row("asgd", ASGD, seed, RATE_OF_MANY, MANY)]
    return [*found, *_kinds(seed, RATE_OF_MANY, MANY), _row("asgd", ASGD, seed, RATE_OF_MANY / 2, MANY)]


def strengths(seed: int) -> list[Row]:
    """What the strengths were chosen by."""
    found = [_row(kind, compensated(kind, one), seed) for kind, each in TRIED.items() for one in each]
    limited = [(kind, one) for kind, each in LIMITED.items() for one in each]
    return found + [_row(f"{kind}, limit", compensated(kind, one, ", limit=1"), seed) for kind, one in limited]


def rates(seed: int) -> list[Row]:
    """What the rates were chosen by."""
    found = [_row("one worker", "", seed, rate, 1) for rate in (0.2, 0.3, 0.4)]
    found += [_row("asgd", ASGD, seed, rate) for rate in (0.1, 0.15, 0.2, 0.3, 0.4)]
    found += [_row("synchronous", "lockstep", seed, rate) for rate in (0.05, 0.1, 0.2)]
    kinds = ("adaptive", "normalized")
    found += [_row(kind, compensated(kind, TUNED[kind]), seed, 0.2) for kind in kinds]
    found += [_row("constant", compensated("constant", 40.0), seed, 0.2)]
    return [*found, _row("normalized", compensated("normalized", TUNED["normalized"]), seed, 0.4)]


def published(seed: int) -> list[Row]:
    """The article's adaptive strength, as it is, at fewer rates than `asgd` has."""
    return [_row("adaptive", compensated("adaptive", 2.0), seed, rate) for rate in (0.15, 0.2, RATE)]


def halves(seed: int) -> list[Row]:
    """Where the delays do harm."""
    return [_row(half, half, seed) for half in HALVES]


def why(seed: int) -> list[Row]:
    """The plateau; and, in short trainings, the exact Hessian."""
    found = [Row("one worker", 1, RATE, "", MINIBATCHES // 2, seed)]
    for rate in (0.1, RATE):
        rules = [("one worker", 1, ""), ("asgd", WORKERS, ASGD), ("exact Hessian", WORKERS, "hessian")]
        found += [Row(method, workers, rate, rule, SHORT, seed) for method, workers, rule in rules]
    return found


ROWS: dict[str, Callable[[int], list[Row]]] = {
    "table": table,
    "few": few,
    "many": many,
    "halves": halves,
    "why": why,
    "strengths": strengths,
    "rates": rates,
    "published": published,
}
ONCE = ("why", "strengths", "rates")
"""For the first seed alone."""
