# SPDX-License-Identifier: Apache-2.0
"""Findings from the measurements, each with a sentence and advice; pure.

A cluster is fit where nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline_plugins.forecast.doctor.finding import Finding, speeds
from paceline_plugins.forecast.doctor.judge_links import clocks, distance, speed
from paceline_plugins.forecast.doctor.judge_machines import cores, files, gpus, memory, shared_memory, versions
from paceline_plugins.forecast.doctor.judge_reach import attendance, gloo, reach
from paceline_plugins.forecast.doctor.judge_wires import wires
from paceline_plugins.forecast.doctor.measured import Measurements


def judge(found: Measurements, parameters: int | None = None) -> list[Finding]:
    """All findings, the wrong ones first.

    Args:
        found: the measurements.
        parameters: number of parameters of the model, where known.
    """
    rules: list[Callable[[Measurements], list[Finding]]] = [
        attendance,
        reach,
        gloo,
        wires,
        speed,
        distance,
        clocks,
        versions,
        lambda m: memory(m, parameters),
        shared_memory,
        files,
        cores,
        gpus,
    ]
    findings = [finding for rule in rules for finding in rule(found)]
    order = {"wrong": 0, "note": 1, "good": 2}
    return sorted(findings, key=lambda finding: order[finding.severity])


def fit(findings: Sequence[Finding]) -> bool:
    """Whether training can begin."""
    return not any(finding.severity == "wrong" for finding in findings)


def slowest_bytes_s(found: Measurements) -> float | None:
    """Speed of the slowest link between hosts (of a single host: between workers)."""
    return min(speeds(found.across()), default=None)


def exchange_s(found: Measurements, parameters: int) -> float | None:
    """Seconds of one exchange of an fp32 model: 2 (N-1)/N * 4 P bytes over the slowest link."""
    slowest = slowest_bytes_s(found)
    if not slowest:
        return None
    return 2 * (found.size - 1) / found.size * 4 * parameters / slowest
