# SPDX-License-Identifier: Apache-2.0
"""Findings about interfaces: their packets, their rates, and the one that should be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline_plugins.forecast.doctor.judge import Finding, wires
from paceline_plugins.forecast.doctor.machine import mtus, wires_mbit
from paceline_plugins.forecast.doctor.measured import Measurements
from tests.forecast.doctor.examples import GBIT, cluster, with_links, with_machine


def on_all(found: Measurements, **changed: Any) -> Measurements:
    for rank in found.machines:
        found = with_machine(found, rank, **changed)
    return found


def only(found: Measurements) -> Finding:
    (finding,) = wires(found)
    return finding


def test_equal_packets_and_usual_wires_are_not_worth_a_word() -> None:
    assert wires(cluster()) == []
    assert wires(on_all(cluster(), mtus={"eth0": 1500}, wires_mbit={"eth0": 1000})) == []
    assert wires(with_machine(cluster(2, hosts=1), 0, mtus={"eth0": 9000})) == []


def test_packets_that_differ_are_wrong_and_the_smaller_one_is_named() -> None:
    finding = only(with_machine(on_all(cluster(), mtus={"eth0": 9000}), 1, mtus={"eth0": 1500}))
    assert (finding.severity, finding.ranks) == ("wrong", (1,))
    assert "node0 eth0 9000, node1 eth0 1500, node2 eth0 9000; large transfers may hang" in finding.sentence
    assert finding.advice.startswith("on node1: sudo ip link set dev eth0 mtu 9000 (")


def test_a_faster_interface_beside_the_used_one_is_a_note() -> None:
    both = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "enp1s0": "10.10.0.1"}
    finding = only(with_machine(cluster(), 0, interfaces=both, wires_mbit={"eth0": 1000, "enp1s0": 40_000}))
    assert (finding.severity, finding.about, finding.ranks) == ("note", "interface", (0,))
    assert finding.sentence == "node0 uses eth0, which has 1 Gbit/s, and enp1s0 (10.10.0.1) has 40 Gbit/s"
    assert "on node0: export GLOO_SOCKET_IFNAME=enp1s0" in finding.advice
    bare = only(with_machine(cluster(), 0, wires_mbit={"eth0": 1000, "enp1s0": 40_000}))
    assert bare.advice.startswith("give it an address first (sudo ip addr add 10.10.0.1/24 dev enp1s0)")


def test_a_wire_of_100_mbit_is_wrong() -> None:
    slow = with_links(cluster(), [(1, 0), (1, 2)], bandwidth_bytes_s=0.09 * GBIT)
    finding = only(with_machine(slow, 1, wires_mbit={"eth0": 100}))
    assert (finding.severity, finding.about) == ("wrong", "wires")
    assert finding.sentence == "the wire of node1 (eth0) has 100 Mbit/s"
    assert "sudo ethtool -s eth0 autoneg on" in finding.advice


@pytest.mark.parametrize(("speed", "means"), [("10000\n", {"eth0": 10_000}), ("-1\n", {}), ("", {})])
def test_what_the_kernel_says(tmp_path: Path, speed: str, means: dict[str, int]) -> None:
    for name in ("lo", "eth0", "veth0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mtu").write_text("1500\n")
        (tmp_path / name / "speed").write_text(speed)
    (tmp_path / "eth0" / "device").mkdir()
    assert mtus(tmp_path) == {"eth0": 1500, "veth0": 1500}
    assert wires_mbit(tmp_path) == means
    assert mtus(tmp_path / "nowhere") == {}
