# SPDX-License-Identifier: Apache-2.0
"""`paceline plan` against published measurements of others: is the share of the time that computes forecast?

1. Four hosts with a GPU each, links shaped to 50 to 5,000 Mbit/s, a model of 30.8 million numbers, DiLoCo and local SGD
   without overlap, an exchange after every 8, 32 or 128 minibatches (github.com/Adnan082/diloco-measured, commit
   07b7885, `experiments/01_cu_grid`; the figures below are means over its runs, of rank 0). Forecasts, each with
   another knowledge of the network:

   nominal    the rate to which the link is shaped, less headers
   measured   the rate of one exchange, of that repository's DiLoCo runs with an exchange after every minibatch, which
              are not forecast; so would `paceline doctor` measure it
   slowest    the same, and how much longer the slowest worker takes for a minibatch than rank 0, from what exchanges at
              5,000 Mbit/s take longer after 128 minibatches than after 8; forecast are the other rates

2. DDL, 256 GPUs in 64 hosts: 95 % of 256 times one GPU's speed for ResNet-50 (arXiv 1708.02188). A step of 0.2 s is
   taken from 50 minutes for 90 passes over 1.28 million pictures with 32 a GPU; 100 Gbit/s a host and rail. Forecasts
   with and without gradients sent during the backward pass, one and two rails, and a spread of the step times.

    python benchmarks/published.py [--quick]

The last line is a JSON object: `median_error` and `worst_error`, by forecast (`diloco_measured` and so on) the share
by which the forecast utilisation is off, `points`, by forecast; `ddl`, by case, the forecast efficiency, and
`ddl_spread`, the largest spread of step times at which 95 % are reached with overlap.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator

import _quick

from paceline.forecast.planner.forecast import forecast
from paceline.forecast.planner.network import ETHERNET, Network, NetworkLink
from paceline.forecast.planner.stragglers import LogNormal
from paceline.forecast.planner.workload import Workload
from paceline.rules.codec import Layout
from paceline.rules.recipes import rule_from_text

PARAMETERS, WORKERS = 30_846_720, 4
RATES = (50, 200, 1000, 5000)
# minibatches of a block -> at each rate (milliseconds of computing a minibatch, milliseconds of an exchange)
MEASURED = {
    "diloco": {
        1: ((26.63, 37842.0), (26.59, 8280.3), (26.65, 1506.2), (26.86, 317.8)),
        8: ((25.45, 37911.4), (25.43, 8283.1), (25.55, 1507.7), (25.63, 318.5)),
        32: ((25.49, 37317.7), (25.53, 8286.5), (25.52, 1606.0), (25.49, 421.2)),
        128: ((25.54, 36061.8), (25.60, 8528.8), (25.56, 1868.2), (25.58, 703.2)),
    },
    "averaging": {
        8: ((24.68, 38090.8), (24.68, 8256.6), (24.60, 1509.0), (24.65, 321.0)),
        32: ((24.47, 36439.1), (24.53, 8310.3), (24.60, 1692.8), (24.62, 510.6)),
        128: ((24.50, 36366.4), (24.51, 8748.2), (24.56, 2297.1), (24.67, 1035.6)),
    },
}
KNOWN = ("nominal", "measured", "slowest")
RING = 2 * (WORKERS - 1) / WORKERS * 4 * PARAMETERS
"""Bytes that a worker sends for one sum."""
LATENCY_S = 50e-6
RESNET, GPUS, PER_HOST, PICTURES = 25_557_032, 256, 4, 32
DDL_STEP_S = PICTURES * GPUS * 50 * 60 / (90 * 1_281_167)
RAIL = NetworkLink(2e-6, 0.97 * 100e9 / 8, 1e-6)
NVLINK = NetworkLink(3e-6, 40e9, 1e-6)


def link_of(known: str, rate: int) -> NetworkLink:
    """The link between two hosts, as far as it is known."""
    if known == "nominal":
        return NetworkLink(LATENCY_S, ETHERNET * rate * 1e6 / 8)
    _, exchange_ms = MEASURED["diloco"][1][RATES.index(rate)]
    return NetworkLink(LATENCY_S, RING / exchange_ms * 1e3)


def slower_ms(rule: str) -> float:
    """By how much a minibatch of the slowest worker takes longer than one of rank 0."""
    return (MEASURED[rule][128][-1][1] - MEASURED[rule][8][-1][1]) / (128 - 8)


def errors(rule: str, known: str) -> Iterator[tuple[str, float, float]]:
    """(point, forecast utilisation, measured one) of each point."""
    for period in (8, 32, 128):
        for rate, (step_ms, exchange_ms) in zip(RATES, MEASURED[rule][period], strict=True):
            if known == "slowest" and rate == RATES[-1]:
                continue
            work = Workload(LogNormal(step_ms / 1e3, 0.0), Layout.vector(PARAMETERS))
            found = forecast(
                rule_from_text(f"{rule}(period={period})"), work, Network(known, link_of(known, rate)), WORKERS
            )
            step_s = found.step_s + (slower_ms(rule) / 1e3 if known == "slowest" else 0.0)
            measured = step_ms / (step_ms + exchange_ms / period)
            yield f"{rule}(period={period}) at {rate} Mbit/s", step_ms / 1e3 / step_s, measured


def ddl(rails: int, overlap: bool, spread: float) -> float:
    """Forecast efficiency of synchronous training as in DDL's publication."""
    host = NetworkLink(RAIL.latency_s, rails * RAIL.bandwidth_bytes_s, RAIL.message_s)
    work = Workload(LogNormal(DDL_STEP_S, spread), Layout.vector(RESNET), backward=2 / 3 if overlap else 0.0)
    return forecast(rule_from_text("sync()"), work, Network("ddl", host, NVLINK, PER_HOST), GPUS).efficiency


def largest_spread(wanted: float) -> float:
    """The largest spread of step times with which the efficiency is reached, with overlap on one rail."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if ddl(1, True, middle) >= wanted else (low, middle)
    return low


def main() -> None:
    """Forecast, and print the tables."""
    _quick.parse(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    median, worst, points = dict[str, float](), dict[str, float](), dict[str, int]()
    for rule in MEASURED:
        for known in KNOWN:
            rows = list(errors(rule, known))
            off = [abs(said / was - 1) for _, said, was in rows]
            name = f"{rule}_{known}"
            median[name], worst[name] = round(statistics.median(off), 4), round(max(off), 4)
            points[name] = len(rows)
            print(f"\n{name}: median {median[name]:.1%}, worst {worst[name]:.1%}")
            for (point, said, was), error in zip(rows, off, strict=True):
                print(f"  {point:35} {said:8.2%} {was:8.2%} {error:7.1%}")
    cases = {
        f"{'overlap' if overlap else 'no_overlap'}_{rails}_rail{'s' if rails > 1 else ''}_spread_{100 * spread:g}": ddl(
            rails, overlap, spread
        )
        for overlap in (True, False)
        for rails in (1, 2)
        for spread in (0.0, 0.01, 0.02)
    }
    print()
    for name, efficiency in cases.items():
        print(f"{name:32} {efficiency:7.1%}")
    result = {
        "median_error": median,
        "worst_error": worst,
        "points": points,
        "ddl": {name: round(efficiency, 4) for name, efficiency in cases.items()},
        "ddl_spread": round(largest_spread(0.95), 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
