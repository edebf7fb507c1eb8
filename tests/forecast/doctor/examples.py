# SPDX-License-Identifier: Apache-2.0
"""Measurements made by hand: a healthy cluster, from which a test takes what it wants to be ill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline_plugins.forecast.doctor.measured import Machine, MeasuredLink, Measurements

GBIT = 125e6
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "paceline": "0.1.0", "system": "Linux 6.1"}


def machine(rank: int, host: str, **changed: Any) -> Machine:
    """A worker with nothing wrong."""
    healthy = Machine(
        rank=rank,
        host=host,
        versions=VERSIONS,
        cores=8,
        load=0.3,
        memory_bytes=64_000_000_000,
        shm_bytes=8_000_000_000,
        open_files=65536,
        interfaces={"lo": "127.0.0.1", "eth0": f"10.0.0.{rank + 1}"},
        resolved=[f"10.0.0.{rank + 1}"],
        gloo_address=f"10.0.0.{rank + 1}",
    )
    return replace(healthy, **changed)


def cluster(size: int = 3, hosts: int | None = None) -> Measurements:
    """`size` workers on as many hosts, or fewer; all links alike."""
    names = [f"node{rank * (hosts or size) // size}" for rank in range(size)]
    links = [
        MeasuredLink(a, b, f"10.0.0.{b + 1}", latency_s=2e-4, bandwidth_bytes_s=GBIT, clock_s=1e-4)
        for a in range(size)
        for b in range(size)
        if a != b
    ]
    return Measurements(size, {rank: machine(rank, names[rank]) for rank in range(size)}, links)


def with_machine(found: Measurements, rank: int, **changed: Any) -> Measurements:
    """One worker changed."""
    return replace(found, machines=found.machines | {rank: replace(found.machines[rank], **changed)})


def with_links(found: Measurements, pairs: list[tuple[int, int]], **changed: Any) -> Measurements:
    """Some links changed."""
    return replace(found, links=[replace(k, **changed) if (k.source, k.target) in pairs else k for k in found.links])


def broken(found: Measurements, pairs: list[tuple[int, int]], problem: str = "10.0.0.9: no answer") -> Measurements:
    """Some links that do not open."""
    nothing = {"address": "", "latency_s": None, "bandwidth_bytes_s": None, "clock_s": None}
    return with_links(found, pairs, problem=problem, **nothing)
