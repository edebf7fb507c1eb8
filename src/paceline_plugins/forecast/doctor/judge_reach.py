# SPDX-License-Identifier: Apache-2.0
"""Findings about missing workers, broken connections, and the interface on which gloo listens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline_plugins.forecast.doctor.finding import Finding, ranks_text
from paceline_plugins.forecast.doctor.measured import MeasuredLink, Measurements

ASK = "GLOO_SOCKET_IFNAME"


def attendance(found: Measurements) -> list[Finding]:
    findings = []
    if found.missing:
        several = len(found.missing) > 1
        sentence = f"{ranks_text(found.missing)} did not come within {found.timeout_s:g} s"
        advice = (
            f"start {'them' if several else 'it'}; if {'they say' if several else 'it says'} that MASTER_ADDR cannot "
            "be reached, open that port on the host of rank 0"
        )
        findings.append(Finding("wrong", "workers", sentence, advice, tuple(found.missing)))
    if found.lost:
        sentence = f"{found.names(found.lost)} came and then stopped answering"
        advice = "read its output, and check that its host is up and its link is stable"
        findings.append(Finding("wrong", "workers", sentence, advice, tuple(found.lost)))
    if not findings:
        hosts = len(found.hosts)
        findings.append(Finding("good", "workers", f"all {found.size} came, on {hosts} host{'s' if hosts > 1 else ''}"))
    return findings


def reach(found: Measurements) -> list[Finding]:
    """Name the ranks that are cut off, and then the remaining pairs."""
    broken = [link for link in found.links if link.problem]
    present = len(found.machines)
    findings: list[Finding] = []
    if not broken and present > 1:
        findings.append(Finding("good", "connections", f"all {len(found.links)} open, on ports of the system's choice"))
    while broken:
        rank, how = _culprit(broken, present)
        if how is None:
            return [*findings, *_pairs(found, broken)]
        findings.append(_cut_off(found, rank, how, broken))
        broken = [link for link in broken if rank not in (link.source, link.target)]
    return findings


def _culprit(broken: Sequence[MeasuredLink], present: int) -> tuple[int, str | None]:
    """A rank all of whose links are broken, and the direction: "in", "out" or "both"; or (-1, None)."""
    others = present - 1
    ins = Counter(link.target for link in broken)
    outs = Counter(link.source for link in broken)
    for rank in sorted({*ins, *outs}, key=lambda r: (-ins[r] - outs[r], r)):
        inward, outward = ins[rank] >= others, outs[rank] >= others
        if others > 1 and (inward or outward):
            return rank, "both" if inward and outward else "in" if inward else "out"
    return -1, None


def _cut_off(found: Measurements, rank: int, how: str, broken: Sequence[MeasuredLink]) -> Finding:
    problem = next(link.problem for link in broken if rank in (link.source, link.target))
    sentence = {
        "both": f"{found.name(rank)} reaches no worker, and no worker reaches it",
        "in": f"no worker reaches {found.name(rank)}, while it reaches others",
        "out": f"{found.name(rank)} reaches no worker, while others reach it",
    }[how]
    return Finding("wrong", "connections", f"{sentence} ({problem})", _advice(found, rank, problem), (rank,))


def _pairs(found: Measurements, broken: Sequence[MeasuredLink]) -> list[Finding]:
    """A pair that is broken in both directions is one finding."""
    ways = {(link.source, link.target): link for link in broken}
    findings = []
    for (source, target), link in ways.items():
        back = ways.get((target, source))
        if back is None:
            sentence = f"{found.name(source)} does not reach {found.name(target)} ({link.problem})"
        elif source < target:
            problem = link.problem if link.problem == back.problem else f"{link.problem}; {back.problem}"
            sentence = f"{found.name(source)} and {found.name(target)} do not reach each other ({problem})"
        else:
            continue
        findings.append(
            Finding("wrong", "connections", sentence, _advice(found, target, link.problem), (source, target))
        )
    return findings


def _advice(found: Measurements, rank: int, problem: str) -> str:
    machine = found.machines[rank]
    others = [n for n, a in machine.interfaces.items() if not a.startswith("127.") and n != machine.gloo_interface]
    beside = f"; or set {ASK}, there, to an interface that other hosts reach ({', '.join(others)})" if others else ""
    if "refused" in problem:
        return f"the address belongs to another host or is blocked: give {machine.host} one name and address{beside}"
    return (
        "a firewall or a missing route drops it (check with `ip route get ADDRESS`): gloo listens on ports of the "
        f"system's choice, so let the cluster's hosts reach every TCP port of {machine.host}{beside}"
    )


def gloo(found: Measurements) -> list[Finding]:
    """Whether gloo's default interface is reachable from other hosts."""
    findings = []
    for rank, machine in sorted(found.machines.items()):
        if machine.asked_interface and not machine.gloo_address:
            sentence = f"{found.name(rank)} has no interface {machine.asked_interface} with an IPv4 address"
            names = ", ".join(machine.interfaces) or "none"
            findings.append(Finding("wrong", "interface", sentence, f"set {ASK} to one of: {names}", (rank,)))
        elif len(found.hosts) > 1:
            findings += _gloo_between_hosts(found, rank)
    if findings or len(found.machines) < 2:
        return findings
    taken = {f"{m.gloo_interface or '?'} {m.gloo_address}" for m in found.machines.values()}
    shown = ", ".join(sorted(taken)[:8])
    return [Finding("good", "interface", f"gloo takes {shown}"), *_several_interfaces(found)]


def _gloo_between_hosts(found: Measurements, rank: int) -> list[Finding]:
    machine, address = found.machines[rank], found.machines[rank].gloo_address
    used = next((k for k in found.links if k.target == rank and k.address and k.gloo_problem), None)
    outside = [name for name, a in machine.interfaces.items() if not a.startswith("127.")]
    better = next((n for n, a in machine.interfaces.items() if used and a == used.address), "") or " or ".join(outside)
    advice = f"set {ASK}={better or 'INTERFACE'} on {machine.host}, or correct its /etc/hosts"
    if not address:
        sentence = f"on {machine.host} its own name has no address, so gloo would not know where to listen"
    elif address.startswith("127."):
        sentence = f"on {machine.host} its own name has {address}, which no other host reaches; gloo would take it"
    elif used is not None:
        sentence = f"gloo would take {used.gloo_problem} on {machine.host}; {used.address} does answer"
    else:
        return []
    return [Finding("wrong", "interface", sentence, advice, (rank,))]


def _several_interfaces(found: Measurements) -> list[Finding]:
    if len(found.hosts) < 2:
        return []
    several = [
        machine
        for machine in found.machines.values()
        if not machine.asked_interface and sum(not a.startswith("127.") for a in machine.interfaces.values()) > 1
    ]
    if not several:
        return []
    one = several[0]
    shown = ", ".join(f"{name} {address}" for name, address in one.interfaces.items() if not address.startswith("127."))
    hosts = ", ".join(dict.fromkeys(machine.host for machine in several))
    sentence = f"{hosts} could take several interfaces ({shown}); gloo takes {one.gloo_interface or '?'}"
    return [Finding("note", "interface", sentence, f"if that is not the fast one, set {ASK}")]
