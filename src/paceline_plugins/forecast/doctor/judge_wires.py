# SPDX-License-Identifier: Apache-2.0
"""Findings about the interfaces between hosts: packet sizes, slow wires, and a faster one that is not used."""

from __future__ import annotations

from collections.abc import Iterator

from paceline_plugins.forecast.doctor.finding import Finding, speeds
from paceline_plugins.forecast.doctor.measured import Machine, Measurements

USUAL_MTU, JUMBO_MTU = 1500, 9000
FAST_MBIT = 10_000
"""From this rate on large packets spare processors much work."""
SLOW_MBIT = 1000
"""Every wire of today has so much; less is a damaged cable or an old switch."""
FALLS_SHORT = 0.5
"""Less than this share of a wire's rate, measured, is worth a look."""


def wires(found: Measurements) -> list[Finding]:
    """All findings about the interfaces that the hosts use for each other."""
    if len(found.hosts) < 2:
        return []
    used = {rank: used_interface(found, rank) for rank in found.machines}
    each = {found.machines[rank].host: rank for rank in sorted(found.machines, reverse=True)}  # host -> its first rank
    findings = _mtus(found, used, each)
    for rank in sorted(each.values()):
        findings += _wire(found, rank, used[rank])
    return findings


def used_interface(found: Measurements, rank: int) -> str:
    """The interface at which other hosts reached a worker; that of gloo where none did; empty if unknown."""
    addresses = {link.address for link in found.across() if link.target == rank and link.address}
    machine = found.machines[rank]
    names = [name for name, address in machine.interfaces.items() if address in addresses]
    return names[0] if names else machine.gloo_interface


def _mtus(found: Measurements, used: dict[int, str], each: dict[str, int]) -> list[Finding]:
    """Packets that one host sends and another does not take get lost, and large transfers hang."""
    sizes = {rank: found.machines[rank].mtus[used[rank]] for rank in each.values()
             if used[rank] in found.machines[rank].mtus}  # fmt: skip
    if len(set(sizes.values())) > 1:
        most = max(sizes.values())
        shown = ", ".join(f"{found.machines[rank].host} {used[rank]} {size}" for rank, size in sorted(sizes.items()))
        smaller = [rank for rank in sorted(sizes) if sizes[rank] < most]
        commands = "; ".join(f"on {found.machines[r].host}: {set_mtu(used[r], most)}" for r in smaller)
        sentence = f"the largest packets (MTU) differ: {shown}; large transfers may hang"
        return [Finding("wrong", "packets", sentence, f"{commands} (the switch must take them, too)", tuple(smaller))]
    fast = [rank for rank in sizes if _rate(found.machines[rank], used[rank]) >= FAST_MBIT]
    if fast and len(fast) == len(sizes) and max(sizes.values()) <= USUAL_MTU:
        sentence = f"all have packets of {USUAL_MTU} bytes (MTU) on wires of {FAST_MBIT // 1000} Gbit/s and more"
        command = set_mtu(used[fast[0]], JUMBO_MTU)
        advice = f"larger ones spare the processors work: {command} on every host, if the switch takes them"
        return [Finding("note", "packets", sentence, advice, tuple(sorted(fast)))]
    return []


def set_mtu(interface: str, size: int) -> str:
    """The command that changes the size of an interface's packets."""
    return f"sudo ip link set dev {interface} mtu {size}"


def _rate(machine: Machine, interface: str) -> int:
    """What the wire was negotiated to, Mbit/s; 0 if unknown."""
    return machine.wires_mbit.get(interface, 0)


def _wire(found: Measurements, rank: int, interface: str) -> Iterator[Finding]:
    """A slow wire, a faster one that is not used, and a wire that does not give what it has."""
    machine, rate = found.machines[rank], _rate(found.machines[rank], interface)
    if not rate:
        return
    better = max(machine.wires_mbit, key=lambda name: machine.wires_mbit[name])
    if machine.wires_mbit[better] > rate:
        has = f"{better} ({machine.interfaces.get(better, 'no address')}) has {_text(machine.wires_mbit[better])}"
        sentence = f"{machine.host} uses {interface}, which has {_text(rate)}, and {has}"
        advice = (
            "if the other hosts are on it as well, name the hosts by their addresses there, or on "
            f"{machine.host}: export GLOO_SOCKET_IFNAME={better} NCCL_SOCKET_IFNAME={better}"
        )
        if better not in machine.interfaces:
            advice = f"give it an address first (sudo ip addr add 10.10.0.{rank + 1}/24 dev {better}); {advice}"
        yield Finding("note", "interface", sentence, advice, (rank,))
    elif rate < SLOW_MBIT:
        sentence = f"the wire of {machine.host} ({interface}) has {_text(rate)}"
        advice = f"take another cable and port, then: sudo ethtool -s {interface} autoneg on"
        yield Finding("wrong", "wires", sentence, advice, (rank,))
    sent = speeds(link for link in found.across() if link.source == rank)
    if sent and max(sent) * 8 / 1e6 < FALLS_SHORT * rate:
        sentence = f"{machine.host} sends at {_text(max(sent) * 8 / 1e6)} over a wire of {_text(rate)} ({interface})"
        advice = f"look for errors: ip -s link show dev {interface}; then for other traffic and slower switches"
        yield Finding("note", "wires", sentence, advice, (rank,))


def _text(mbit: float) -> str:
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:.0f} Mbit/s"
