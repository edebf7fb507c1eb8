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
   own        of its four runs of DistributedDataParallel on shaped links (forecast as `sync`): by how much their
              exchange at 1,000 Mbit/s takes longer than DiLoCo's of as many bytes; forecast are the other rates

2. Horovod, 128 and 512 GPUs, four a host, 25 Gbit/s a host: 90 % of the speed of so many single GPUs for Inception V3,
   79 and 68 % for VGG-16 (its README, and that of its first releases). The step is that of a P100 with 64 pictures in
   TensorFlow's published benchmarks (tensorflow/tensorflow 6535ed7, docs_src/performance/benchmarks.md).

    python benchmarks/seeds/published.py [--quick]

The last line is a JSON object: `median_error` and `worst_error`, by forecast (`diloco_measured` and so on) the share
by which the forecast utilisation is off, `points`, by forecast; `horovod`, by spread, model and GPUs, the forecast
efficiency, and `horovod_error`, by spread, the median and the worst error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick

from paceline.rules.codec import Layout
from paceline.rules.recipes import rule_from_text
from paceline_plugins.forecast.planner.forecast import forecast
from paceline_plugins.forecast.planner.network import ETHERNET, Network, NetworkLink
from paceline_plugins.forecast.planner.stragglers import LogNormal
from paceline_plugins.forecast.planner.workload import Workload

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
    # of DistributedDataParallel the computing is a minibatch without exchange, and the exchange is all the rest
    "sync": {1: ((20.57, 53419.2), (20.69, 11338.7), (22.59, 1971.3), (22.18, 397.7))},
}
KNOWN = {
    "diloco": ("nominal", "measured", "slowest"),
    "averaging": ("nominal", "measured", "slowest"),
    "sync": ("nominal", "measured", "own"),
}
NOT_FORECAST = {"slowest": 5000, "own": 1000}
"""Rate whose points tell what is known, so that they are not forecast."""
RING = 2 * (WORKERS - 1) / WORKERS * 4 * PARAMETERS
"""Bytes that a worker sends for one sum."""
LATENCY_S = 50e-6
BACKWARD = 2 / 3  # share of a step during which gradients may travel
PER_HOST = 4


INCEPTION, VGG = 23_834_568, 138_357_544
HOROVOD = {
    # model: (numbers, pictures a second of one GPU, GPUs -> published efficiency)
    "inception_v3": (INCEPTION, 142, {128: 0.90, 512: 0.90}),
    "vgg16": (VGG, 154, {128: 0.79, 512: 0.68}),
}
HOROVOD_PICTURES, HOROVOD_RAIL = 64, NetworkLink(2e-6, 0.97 * 25e9 / 8, 1e-6)
PCI = NetworkLink(3e-6, 10e9, 1e-6)


def link_of(known: str, rate: int) -> NetworkLink:
    """The link between two hosts, as far as it is known."""
    if known == "nominal":
        return NetworkLink(LATENCY_S, ETHERNET * rate * 1e6 / 8)
    _, exchange_ms = MEASURED["diloco"][1][RATES.index(rate)]
    more = ddp_over_diloco() if known == "own" else 1.0
    return NetworkLink(LATENCY_S, RING / (more * exchange_ms) * 1e3)


def ddp_over_diloco() -> float:
    """How many times as long DistributedDataParallel takes to exchange as much as one exchange of DiLoCo."""
    at = RATES.index(NOT_FORECAST["own"])
    (_, diloco_ms), (step_ms, rest_ms) = MEASURED["diloco"][1][at], MEASURED["sync"][1][at]
    hidden = BACKWARD * step_ms  # during the backward pass it exchanges and computes
    return (rest_ms + hidden) / diloco_ms


def slower_ms(rule: str) -> float:
    """By how much a minibatch of the slowest worker takes longer than one of rank 0."""
    return (MEASURED[rule][128][-1][1] - MEASURED[rule][8][-1][1]) / (128 - 8)


def errors(rule: str, known: str) -> Iterator[tuple[str, float, float]]:
    """(point, forecast utilisation, measured one) of each point."""
    for period, points in MEASURED[rule].items():
        if rule == "diloco" and period == 1:
            continue  # these tell what the link carries
        text = rule if period == 1 else f"{rule}(period={period})"
        for rate, (step_ms, exchange_ms) in zip(RATES, points, strict=True):
            if rate == NOT_FORECAST.get(known):
                continue
            backward = BACKWARD if rule == "sync" else 0.0
            work = Workload(LogNormal(step_ms / 1e3, 0.0), Layout.vector(PARAMETERS), backward=backward)
            found = forecast(rule_from_text(text), work, Network(known, link_of(known, rate)), WORKERS)
            step_s = found.step_s + (slower_ms(rule) / 1e3 if known == "slowest" else 0.0)
            measured = step_ms / (step_ms + exchange_ms / period)
            yield f"{text} at {rate} Mbit/s", step_ms / 1e3 / step_s, measured


def horovod(model: str, gpus: int, spread: float) -> float:
    """Forecast efficiency of synchronous training as in Horovod's benchmarks."""
    numbers, pictures_s, _ = HOROVOD[model]
    work = Workload(LogNormal(HOROVOD_PICTURES / pictures_s, spread), Layout.vector(numbers), backward=BACKWARD)
    return forecast(rule_from_text("sync()"), work, Network("horovod", HOROVOD_RAIL, PCI, PER_HOST), gpus).efficiency


def horovod_tables() -> tuple[dict[str, float], dict[str, list[float]]]:
    """Forecasts by spread, model and GPUs; by spread the median and the worst error."""
    said, off = dict[str, float](), dict[str, list[float]]()
    for spread in (0.0, 0.01, 0.02):
        errors = []
        for model, (_, _, published) in HOROVOD.items():
            for gpus, was in published.items():
                found = horovod(model, gpus, spread)
                said[f"{model}_{gpus}_spread_{100 * spread:g}"] = round(found, 4)
                errors.append(abs(found / was - 1))
                print(f"{model:13} {gpus:4} GPUs, spread {spread:4.0%} {found:8.1%} {was:6.0%} {errors[-1]:7.1%}")
        off[f"spread_{100 * spread:g}"] = [round(statistics.median(errors), 4), round(max(errors), 4)]
    return said, off


def main() -> None:
    """Forecast, and print the tables."""
    _quick.parse(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    median, worst, points = dict[str, float](), dict[str, float](), dict[str, int]()
    for rule in MEASURED:
        for known in KNOWN[rule]:
            rows = list(errors(rule, known))
            off = [abs(said / was - 1) for _, said, was in rows]
            name = f"{rule}_{known}"
            median[name], worst[name] = round(statistics.median(off), 4), round(max(off), 4)
            points[name] = len(rows)
            print(f"\n{name}: median {median[name]:.1%}, worst {worst[name]:.1%}")
            for (point, said, was), error in zip(rows, off, strict=True):
                print(f"  {point:35} {said:8.2%} {was:8.2%} {error:7.1%}")
    print()
    horovod_said, horovod_error = horovod_tables()
    result = {
        "median_error": median,
        "worst_error": worst,
        "points": points,
        "horovod": horovod_said,
        "horovod_error": horovod_error,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
