# SPDX-License-Identifier: Apache-2.0
"""Every finding of the doctor, on measurements made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_plugins.forecast.doctor.judge import Finding, exchange_s, fit, judge, slowest_bytes_s
from paceline_plugins.forecast.doctor.measured import Measurements

from .examples import GBIT, VERSIONS, broken, cluster, with_links, with_machine


def found(measurements: Measurements, severity: str, parameters: int | None = None) -> list[Finding]:
    return [finding for finding in judge(measurements, parameters) if finding.severity == severity]


def only(measurements: Measurements, severity: str = "wrong", parameters: int | None = None) -> Finding:
    """The one finding of a severity."""
    findings = found(measurements, severity, parameters)
    assert len(findings) == 1, findings
    assert fit(judge(measurements, parameters)) == (severity != "wrong")
    assert findings[0].advice or severity == "good"
    return findings[0]


def test_a_healthy_cluster_is_fit_and_said_so_briefly() -> None:
    findings = judge(cluster())
    assert fit(findings)
    assert {finding.severity for finding in findings} == {"good"}
    shown = {finding.about: finding.sentence for finding in findings}
    assert shown["workers"] == "all 3 came, on 3 hosts"
    assert shown["connections"] == "all 6 open, on ports of the system's choice"
    assert shown["bandwidth"] == "1000 Mbit/s"
    assert shown["versions"] == "paceline 0.1.0, torch 2.13.0, python 3.11.7, numpy 2.4.6"


def test_who_did_not_come_is_named() -> None:
    here = cluster(4)
    gone = replace(
        here,
        machines={r: m for r, m in here.machines.items() if r not in (1, 3)},
        links=[k for k in here.links if not {k.source, k.target} & {1, 3}],
    )
    finding = only(gone)
    assert finding.sentence == "ranks 1, 3 did not come within 30 s"
    assert finding.ranks == (1, 3)


def test_who_stopped_answering_is_named() -> None:
    finding = only(replace(cluster(), lost=[2]))
    assert finding.sentence == "rank 2 on node2 came and then stopped answering"


def test_a_host_that_is_cut_off_is_one_finding_and_not_four() -> None:
    pairs = [(0, 2), (1, 2), (2, 0), (2, 1)]
    finding = only(broken(cluster(), pairs))
    assert finding.sentence.startswith("rank 2 on node2 reaches no worker, and no worker reaches it (10.0.0.9: no")
    assert "firewall" in finding.advice
    assert finding.ranks == (2,)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(0, 2), (1, 2)], "no worker reaches rank 2 on node2, while it reaches others"),
        ([(2, 0), (2, 1)], "rank 2 on node2 reaches no worker, while others reach it"),
        ([(0, 1)], "rank 0 on node0 does not reach rank 1 on node1"),
        ([(0, 1), (1, 0)], "rank 0 on node0 and rank 1 on node1 do not reach each other"),
    ],
)
def test_what_does_not_connect_is_named_by_direction(pairs: list[tuple[int, int]], words: str) -> None:
    assert only(broken(cluster(), pairs)).sentence.startswith(words)


def test_a_refused_connection_is_not_called_a_firewall() -> None:
    finding = only(broken(cluster(), [(0, 2), (1, 2)], "10.0.0.3: Connection refused"))
    assert "belongs to another host" in finding.advice


def test_the_debian_trap_is_named_with_its_cure() -> None:
    finding = only(with_machine(cluster(), 1, gloo_address="127.0.1.1", resolved=["127.0.1.1"]))
    assert finding.sentence.startswith("on node1 its own name has 127.0.1.1, which no other host reaches")
    assert "GLOO_SOCKET_IFNAME=eth0 on node1" in finding.advice
    assert "/etc/hosts" in finding.advice


def test_loopback_is_right_on_a_single_host() -> None:
    assert found(with_machine(cluster(2, hosts=1), 0, gloo_address="127.0.0.1"), "wrong") == []


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_slow_host_is_named_and_nobody_else(size: int) -> None:
    mine = [(a, b) for a in range(size) for b in range(size) if a != b and 2 in (a, b)]
    finding = only(with_links(cluster(size), mine, bandwidth_bytes_s=GBIT / 10))
    assert finding.sentence == (
        "rank 2 on node2 sends at 100 Mbit/s and receives at 100 Mbit/s, where 1000 Mbit/s is usual"
    )
    assert finding.ranks == (2,)


@pytest.mark.parametrize(("what", "severity"), [("paceline", "wrong"), ("torch", "wrong"), ("numpy", "note")])
def test_versions_that_differ_are_named(what: str, severity: str) -> None:
    finding = only(with_machine(cluster(), 1, versions=VERSIONS | {what: "0.0.1"}), severity)
    assert finding.sentence == f"{what} differs ({VERSIONS[what]}: ranks 0, 2; 0.0.1: rank 1)"
    assert finding.ranks == (1,)


def test_memory_that_is_too_small_for_the_model() -> None:
    small = with_machine(cluster(), 1, memory_bytes=8_000_000_000)
    finding = only(small, "wrong", parameters=1_000_000_000)
    assert finding.sentence == (
        "rank 1 on node1: 8.0 GB free for the workers of that host, where the model needs 16.0 GB a worker"
    )
    assert fit(judge(small, 100_000_000))
    together = cluster(8, hosts=1)  # 64 GB for eight workers
    assert len(found(together, "wrong", parameters=1_000_000_000)) == 1


def test_small_shared_memory_few_files_and_a_busy_host_are_notes() -> None:
    assert "only 64 MB free in /dev/shm" in only(with_machine(cluster(), 0, shm_bytes=64_000_000), "note").sentence
    assert only(with_machine(cluster(), 0, open_files=256), "note").advice == "ulimit -n 1024"
    assert only(with_machine(cluster(), 0, load=7.5), "note").sentence == "node0 is busy: load 7.5 on 8 cores"
    crowd = replace(cluster(2, hosts=1), machines={r: replace(m, cores=1) for r, m in cluster(2, 1).machines.items()})
    assert only(crowd, "note").sentence == "node0 runs 2 workers on 1 core"


def test_what_one_exchange_takes() -> None:
    slow = with_links(cluster(4), [(0, 1)], bandwidth_bytes_s=GBIT / 2)
    assert slowest_bytes_s(slow) == GBIT / 2
    assert exchange_s(slow, 25_000_000) == pytest.approx(1.5 * 4 * 25e6 / (GBIT / 2))
    assert exchange_s(cluster(1), 25_000_000) is None
