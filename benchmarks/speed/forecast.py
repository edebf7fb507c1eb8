# SPDX-License-Identifier: Apache-2.0
"""Is the planner's forecast true? Forecast and measurement side by side, on emulated networks.

Each worker has a host of its own (a network namespace with a shaped cable to a switch) and an emulated accelerator, as
in `network.py`, whose worker this runs: 2, 4 and 8 workers, three rates, four recipes. The forecast is made before the
measurement, from

    the step time of one worker alone that exchanges nothing, measured once for each number of workers;
    the links as they were asked for: rate times 1448/1514, which TCP's payload is of a frame, and the delay;
    the codec's and the copies' time, measured here with all cores at it, since these share the memory, and multiplied
    where workers share a core.

The error is |forecast - measured| / measured of the wall time of a step. `--scale` is as in `network.py`: it divides
parameters and rates alike, so that transfers take as long and the processors, which all hosts share, have less to do.

    python benchmarks/speed/forecast.py [--workers 2,4,8] [--rates 250,1000,4000] [--rules "sync;bmuf(period=16)"]

Needs root. The last line is a JSON object: `median_error`, `worst_error`, and every row.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import network as emulated
import torch
from devtools.emulation import EmulatedNetwork

from paceline.rules.codec import Layout
from paceline.rules.recipes import rule_from_text
from paceline.rules.rule import Rule
from paceline_plugins.forecast.planner import LogNormal, Network, NetworkLink, Workload, forecast
from paceline_plugins.forecast.planner.timing import AFTER_WARMUP, RecordingWire

RULES = "sync;one_bit(warmup=2);bmuf(period=16);streaming_diloco(period=16)"
PAYLOAD = 1448 / 1514
LAYERS = 16
COPIES = 4
"""Times that a synchronisation passes over the model: packed, added to the anchor, summed up, unpacked."""
REPEATS = 3


def layout_of(parameters: int) -> Layout:
    """The matrices of the emulated model."""
    each = parameters // LAYERS
    rows = next(r for r in range(int(each**0.5), 0, -1) if each % r == 0)
    return Layout.of([(rows, each // rows)] * LAYERS)


def on_all_cores(job: Callable[[], float]) -> float:
    """The mean of what a job that times itself says when every core does it at the same time."""
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        return statistics.mean(pool.map(lambda _: job(), range(cores)))


def codec_s(rule: Rule, layout: Layout) -> float:
    """Seconds that one core takes to write and read the whole model once."""
    codec, times = rule.codec.at(AFTER_WARMUP), []
    for _ in range(REPEATS):
        x = torch.randn(layout.numel)
        began = time.perf_counter()
        for _ in codec.exchange(x, layout, RecordingWire(), {}):
            pass
        times.append(time.perf_counter() - began)
    return min(times)


def copies_s(layout: Layout) -> float:
    """Seconds that one core takes for the passes of a synchronisation."""
    x, out, times = torch.randn(layout.numel), torch.zeros(layout.numel), []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(COPIES):
            out.add_(x)
        times.append(time.perf_counter() - began)
    return min(times)


def predicted(text: str, workers: int, at: argparse.Namespace, alone_s: float) -> float:
    """Seconds of a step, as the planner says."""
    rule, layout = rule_from_text(text), layout_of(at.parameters)
    crowd = max(1.0, workers / (os.cpu_count() or 1))
    work = Workload(
        LogNormal(alone_s),
        layout,
        pack_s=crowd * on_all_cores(lambda: copies_s(layout)),
        codec_s=0.0 if rule.codec.exact else crowd * on_all_cores(lambda: codec_s(rule, layout)),
    )
    network = Network("emulated", NetworkLink(at.delay / 1e3, PAYLOAD * at.rate * 1e6 / 8))
    return forecast(rule, work, network, workers).step_s


def compare(options: argparse.Namespace, workers: int, rate: float) -> list[dict[str, Any]]:
    """All recipes at one number of workers and one rate."""
    at, rows = copy.copy(options), []
    at.scale = options.scale or max(1.0, 4 * workers / (os.cpu_count() or 1))
    at.parameters, at.rate = int(options.parameters / at.scale), rate / at.scale
    with EmulatedNetwork(workers, at.rate, at.delay) as network:
        alone_s = emulated.measure(network, at, "no_exchange", 1)["step_s"]
        for text in options.rules:
            said_s = predicted(text, workers, at, alone_s)
            row: dict[str, Any] = {"rule": text, "workers": workers, "rate_mbit": rate, "forecast_ms": 1e3 * said_s}
            try:
                found = emulated.measure(network, at, text.split("(")[0], workers, text)
            except emulated.RowError as error:
                row["skipped"] = str(error)
                print(f"{text:30} skipped: {error}", flush=True)
            else:
                row |= {"measured_ms": 1e3 * found["step_s"], "idle": found["idle"], "alone_ms": 1e3 * alone_s}
                row["error"] = abs(said_s - found["step_s"]) / found["step_s"]
                print(
                    f"{text:30} {workers:3} workers {rate:6g} Mbit/s  forecast {1e3 * said_s:8.1f} ms  measured "
                    f"{row['measured_ms']:8.1f} ms  error {100 * row['error']:5.1f} %  idle {100 * row['idle']:.0f} %",
                    flush=True,
                )
            rows.append(row)
    return rows


def parse() -> argparse.Namespace:
    """The command line; the names that `network.py` gives its workers are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workers", default="2,4,8", help="comma between")
    add("--rates", default="250,1000,4000", help="of each link, each direction, Mbit/s, at full size; comma between")
    add("--rules", default=RULES, help="semicolon between")
    add("--delay", type=float, default=1.0, help="from host to host, one way, ms")
    add("--parameters", type=int, default=25_600_000, help="at full size")
    add("--compute-ms", type=float, default=100.0, help="of the emulated accelerator, a step")
    add("--scale", type=float, default=0.0, help="default 4 workers / cores, 1 = raw")
    add("--steps", type=int, default=12, help="measured, at least")
    add("--blocks", type=int, default=3, help="measured, at least, of rules with blocks")
    add("--row-timeout", type=float, default=300.0, help="seconds after which a row is given up")
    options = _quick.parse(
        parser, workers="2", rates="1000", steps=3, blocks=1, rules="sync;bmuf(period=4)", parameters=2_560_000
    )
    options.workers = [int(word) for word in options.workers.split(",")]
    options.rates = [float(word) for word in options.rates.split(",")]
    options.rules = [text.strip() for text in options.rules.split(";") if text.strip()]
    options.power_rank, options.torchft_python, options.hivemind_python = 2, sys.executable, sys.executable
    return options


def main() -> None:
    """Compare, and print the errors."""
    options = parse()
    torch.set_num_threads(1)
    reason = EmulatedNetwork.possible()
    if reason:
        print(json.dumps({"skipped": {"all": reason}}))
        return
    rows = [row for workers in options.workers for rate in options.rates for row in compare(options, workers, rate)]
    errors = [row["error"] for row in rows if "error" in row]
    result: dict[str, Any] = {"median_error": None, "worst_error": None, "rows": rows, "delay_ms": options.delay}
    if errors:
        result |= {"median_error": round(statistics.median(errors), 4), "worst_error": round(max(errors), 4)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
