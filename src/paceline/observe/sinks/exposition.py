# SPDX-License-Identifier: Apache-2.0
"""Numbers as the text that Prometheus reads: its exposition format, version 0.0.4.

# HELP paceline_sent_bytes_total Bytes sent to other workers.
# TYPE paceline_sent_bytes_total counter
paceline_sent_bytes_total{rank="0",host="alpha"} 1048576
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from paceline.observe.sinks.base import PREFIX, Values

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Family(NamedTuple):
    """A metric of Prometheus."""

    name: str
    kind: str
    help: str


def _counter(name: str, text: str) -> Family:
    return Family(f"paceline_{name}_total", "counter", text)


def _gauge(name: str, text: str) -> Family:
    return Family(f"paceline_{name}", "gauge", text)


SECONDS = _counter("seconds", "Seconds of the thread that trains, by what it did.")
SETTING = _gauge("setting", "A setting that can be tuned, as it is at present.")
VALUE = _gauge("value", "What the program gave to run.log last.")

KNOWN: dict[str, tuple[Family, dict[str, str]]] = {
    "block": (_gauge("block", "Number of the last block that was exchanged; under asynchronous rules, pushes."), {}),
    "exchanges": (_counter("exchanges", "Exchanges that this worker took part in."), {}),
    "minibatches": (_counter("minibatches", "Minibatches of this worker."), {}),
    "samples": (_counter("samples", "Samples of this worker, counted by run.share."), {}),
    "bytes_sent": (_counter("sent_bytes", "Bytes sent to other workers."), {}),
    "left_out": (_counter("left_out", "Contributions of any worker that were kept out of the mean."), {}),
    "workers": (_gauge("workers", "Workers of the run."), {}),
    "computing_s": (SECONDS, {"part": "computing"}),
    "waiting_s": (SECONDS, {"part": "waiting"}),
    "exchanging_s": (SECONDS, {"part": "exchanging"}),
    "waiting_for_data_s": (SECONDS, {"part": "data"}),
    "minibatches_per_s": (_gauge("minibatches_per_second", "Minibatches a second, lately."), {}),
    "samples_per_s": (_gauge("samples_per_second", "Samples a second, lately."), {}),
}
"""The run's own numbers by name; all others of its own are settings."""


def text(values: Values, labels: Mapping[str, str]) -> str:
    """The page that a scrape gets: every value with `labels`, a family together, its HELP and TYPE above it."""
    rows: dict[Family, list[str]] = {}
    for name, value in values.items():
        family, own = _place(name)
        rows.setdefault(family, []).append(f"{family.name}{_labels({**labels, **own})} {_number(value)}")
    lines = [line for family, samples in rows.items() for line in (*_head(family), *samples)]
    return "".join(f"{line}\n" for line in lines)


def _place(name: str) -> tuple[Family, dict[str, str]]:
    if not name.startswith(PREFIX):
        return VALUE, {"name": name}
    own = name.removeprefix(PREFIX)
    return KNOWN.get(own, (SETTING, {"name": own}))


def _head(family: Family) -> Iterable[str]:
    return f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if float(value).is_integer() and abs(value) < 2**63 else repr(float(value))
