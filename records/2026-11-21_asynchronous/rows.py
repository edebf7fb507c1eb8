# SPDX-License-Identifier: Apache-2.0
"""The trainings of this record: every way, with every number of workers and every kind of delay, on both tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WORKERS = (4, 8, 16)
SEEDS = (0, 1, 2)
DELAYS = ("geometric", "uniform")  # computing times: exponential with mean 1 s; between 0.5 and 1.5 s
WAYS = {  # name in the tables -> the rule by task; overlap=0 as in the publications: nobody computes on while pulling
    "asgd": {"digits": "asgd(overlap=0)", "text": "asgd(overlap=0)"},
    "ssp(3)": {"digits": "ssp(staleness=3)", "text": "ssp(staleness=3)"},
    "adadelay": {"digits": "adadelay(overlap=0)", "text": "adadelay(overlap=0)"},
    "dc_asgd constant": {
        "digits": "dc_asgd(kind='constant', strength=4.0, overlap=0)",
        "text": "dc_asgd(kind='constant', strength=16.0, limit=1.0, overlap=0)",
    },
    "dc_asgd adaptive": {
        "digits": "dc_asgd(kind='adaptive', strength=8.0, overlap=0)",
        "text": "dc_asgd(kind='adaptive', strength=2.0, limit=1.0, overlap=0)",
    },
}
Line = dict[str, Any]


def rate_factor(way: str, workers: int) -> int:
    """ssp gives a push 1/N of the rate; N times the rate makes its pushes as large as those of the others."""
    return workers if way == "ssp(3)" else 1


def lines(tasks: dict[str, Any], seed: int) -> Iterator[Line]:
    """What identifies each training of a seed."""
    for name, task in tasks.items():
        common = {"task": name, "seed": seed, "minibatches": task.minibatches}
        yield common | {"way": "sequential", "rule": None, "workers": 1, "delays": None, "lr": task.lr}
        for workers in WORKERS:
            for delays in DELAYS:
                for way, rules in WAYS.items():
                    lr = task.lr * rate_factor(way, workers)
                    yield common | {"way": way, "rule": rules[name], "workers": workers, "delays": delays, "lr": lr}
