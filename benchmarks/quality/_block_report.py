# SPDX-License-Identifier: Apache-2.0
"""What `blocks.py` says in the end: a table for people, and the same as one object."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import _gain_law

Rows = dict[tuple[str, str], list[dict[str, Any]]]
Figures = dict[str, dict[str, Any]]
"""method -> place -> a figure."""


def summary(args: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    """The figures, for people on lines of their own, and returned."""
    each = _by_method({key: [_rounded(row["loss"]) for row in found] for key, found in rows.items()})
    serial = each.pop("serial", {}).get("1")
    result: dict[str, Any] = {
        "study": args.study,
        "optimizer": args.optimizer,
        "minibatches": args.minibatches,
        "batch": args.batch,
        "period": args.period,
        "seeds": args.seeds,
        "room": _room(args),
        "serial": None if serial is None else mean_of(serial),
        "serial_each": serial,
        "loss": changed(each, mean_of),
        "spread": changed(each, spread_of),
        "each": each,
        "chosen": _by_method({key: found[0]["name"] for key, found in rows.items()}),
        "processor_seconds": round(sum(row["processor_seconds"] for found in rows.values() for row in found)),
    }
    show(result)
    if args.study == "gain":
        result["law"] = gain_law(each, args.seeds)
        show_law(result["law"])
    return result


def gain_law(each: Figures, seeds: int) -> dict[str, Any]:
    """The law, of each seed's losses over N and gain."""
    best: dict[str, list[_gain_law.Best | None]] = {}
    for column, found in each.items():
        curves = ({float(gain): losses[seed] for gain, losses in found.items()} for seed in range(seeds))
        best[column.removeprefix("N")] = [_gain_law.best_gain(curve) for curve in curves]
    laws = []
    for seed in range(seeds):
        found_at = {int(workers): all_of[seed] for workers, all_of in best.items()}
        laws.append(_gain_law.law({workers: b.gain for workers, b in found_at.items() if b is not None}))
    known = [law for law in laws if law is not None]
    exponents, slopes = [law.exponent for law in known], [law.slope for law in known if law.slope is not None]
    factors = [law.factor for law in known if law.factor is not None]
    return {
        "best_each": {n: [None if b is None else _rounded(b.gain) for b in found] for n, found in best.items()},
        "at_edge": sorted({int(n) for n, found in best.items() if any(b is not None and b.edge for b in found)}),
        "exponent": mean_of(exponents),
        "exponent_spread": spread_of(exponents),
        "exponent_each": [_rounded(exponent) for exponent in exponents],
        "with_factor": {"slope": mean_of(slopes), "slope_spread": spread_of(slopes), "factor": mean_of(factors)},
    }


# ---- Figures


def _room(args: argparse.Namespace) -> dict[str, float]:
    """N -> minibatches over period x N^2; a study of periods has none of its own."""
    if args.study == "period":
        return {}
    return {str(n): round(args.minibatches / (args.period * n**2), 3) for n in args.workers if n > 1}


def _by_method(found: dict[tuple[str, str], Any]) -> Figures:
    result: Figures = {}
    for (method, place), figure in found.items():
        result.setdefault(method, {})[place] = figure
    return result


def changed(figures: Figures, function: Any) -> Figures:
    """A function of every figure."""
    return {m: {place: function(found) for place, found in places.items()} for m, places in figures.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def mean_of(found: list[Any]) -> float | None:
    """The mean; None where a seed diverged, or there is none."""
    return None if None in found or not found else round(statistics.mean(found), 5)


def spread_of(found: list[Any]) -> float | None:
    """The standard deviation over seeds."""
    return None if None in found or len(found) < 2 else round(statistics.stdev(found), 5)


# ---- For people


def show(result: dict[str, Any]) -> None:
    """The table."""
    losses = result["loss"]
    places = list(dict.fromkeys(place for found in losses.values() for place in found))
    places.sort(key=float)
    if result["serial"] is not None:
        print(f"serial: {_told(result['serial'], spread_of(result['serial_each']), None)}")
    print(f"{result['study']:28}" + "".join(f"{place:>26}" for place in places))
    for method, found in losses.items():
        cells = [
            _told(found[place], result["spread"][method][place], result["serial"]) if place in found else ""
            for place in places
        ]
        print(f"{method:28}" + "".join(f"{cell:>26}" for cell in cells))


def _told(loss: float | None, spread: float | None, serial: float | None) -> str:
    if loss is None:
        return "diverged"
    told = f"{loss:.4f}" + ("" if spread is None else f" +-{spread:.4f}")
    return told if serial is None else f"{told} ({100 * (loss / serial - 1):+.1f} %)"


def show_law(law: dict[str, Any]) -> None:
    """The best gains, and the law."""
    for workers, found in law["best_each"].items():
        edge = ", at the edge of what was tried" if int(workers) in law["at_edge"] else ""
        print(f"N = {workers}: best gain {', '.join('none' if g is None else f'{g:.2f}' for g in found)}{edge}")
    if law["exponent"] is not None:
        spread = "" if law["exponent_spread"] is None else f" +-{law['exponent_spread']:.3f}"
        print(f"gain = N^{law['exponent']:.3f}{spread}")
    both = law["with_factor"]
    if both["slope"] is not None:
        print(f"with a factor: gain = {both['factor']:.3f} N^{both['slope']:.3f}")
