# SPDX-License-Identifier: Apache-2.0
"""Findings from the measurements, each with a sentence and advice; pure.

A cluster is fit where nothing is wrong.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline_plugins.forecast.doctor.measured import Machine, MeasuredLink, Measurements

Severity = Literal["wrong", "note", "good"]
"""`wrong` would stop or slow down a run; `note` is for a person to decide; `good` is in order."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    severity: Severity  # `wrong`, `note` or `good`
    about: str  # the subject, one word or two
    sentence: str  # the result, with names and numbers
    advice: str = ""  # what to do; empty where nothing is to be done
    ranks: tuple[int, ...] = ()  # the workers that it concerns


def rate_text(bytes_s: float) -> str:
    """`940 Mbit/s`."""
    mbit = 8 * bytes_s / 1e6
    if mbit >= 9999.5:
        return f"{mbit / 1000:.1f} Gbit/s"
    return f"{mbit:.0f} Mbit/s" if mbit >= 10 else f"{mbit:.1f} Mbit/s"


def latency_text(seconds: float) -> str:
    """`0.12 ms`."""
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


def speeds(links: Iterable[MeasuredLink]) -> list[float]:
    """The bandwidths that were measured."""
    return [link.bandwidth_bytes_s for link in links if link.bandwidth_bytes_s]


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


# -- who is here, and who reaches whom ---------------------------------------------------------------------------------

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


# -- the links ---------------------------------------------------------------------------------------------------------

SLOW = 0.5  # of the median speed
FAR, FAR_S = 5.0, 1e-3  # times the median round trip, and at least so long
SKEW_S = 0.5


def speed(found: Measurements) -> list[Finding]:
    links = [link for link in found.across() if link.bandwidth_bytes_s]
    if not links:
        return []
    usual = _usual(links)
    slow = [link for link in links if (link.bandwidth_bytes_s or 0) < SLOW * usual]
    if slow and len(found.hosts) > 1:
        return _slow(found, slow, links, usual)
    slowest, fastest = min(speeds(links)), max(speeds(links))
    span = rate_text(slowest) if slowest == fastest else f"{rate_text(slowest)} to {rate_text(fastest)}"
    return [Finding("good", "bandwidth", span)]


def _usual(links: Sequence[MeasuredLink]) -> float:
    """The median over the workers of their best link.

    With one slow host of three, the median over the links would be that of a slow link.
    """
    ranks = {end for link in links for end in (link.source, link.target)}
    return statistics.median(max(speeds(_of(rank, links))) for rank in ranks)


def _slow(
    found: Measurements, slow: Sequence[MeasuredLink], links: Sequence[MeasuredLink], usual: float
) -> list[Finding]:
    """Name the ranks that are slow on all links, and then the remaining slow links."""
    findings, left = [], list(slow)
    while left:
        ends = {end for link in left for end in (link.source, link.target)}
        rank = max(sorted(ends), key=lambda r: (len(_of(r, left)) / len(_of(r, links)), len(_of(r, left))))
        if len(_of(rank, left)) < len(_of(rank, links)) and len(_of(rank, left)) <= 2:
            break
        findings.append(_slow_rank(found, rank, _of(rank, left), usual))
        left = [link for link in left if rank not in (link.source, link.target)]
    for link in left:
        rate = f"{rate_text(link.bandwidth_bytes_s or 0)}, where {rate_text(usual)} is usual"
        sentence = f"{found.name(link.source)} sends to {found.name(link.target)} at {rate}"
        concerned = (link.source, link.target)
        findings.append(Finding("wrong", "bandwidth", sentence, "check the route between these two", concerned))
    return findings


def _slow_rank(found: Measurements, rank: int, links: Sequence[MeasuredLink], usual: float) -> Finding:
    out, into = ([k for k in links if getattr(k, end) == rank] for end in ("source", "target"))
    ways = [f"sends at {rate_text(statistics.median(speeds(out)))}"] if out else []
    ways += [f"receives at {rate_text(statistics.median(speeds(into)))}"] if into else []
    sentence = f"{found.name(rank)} {' and '.join(ways)}, where {rate_text(usual)} is usual"
    advice = (
        "every synchronous exchange runs at the speed of the slowest link: check its cable, switch port and duplex, "
        "and which other programs use it"
    )
    return Finding("wrong", "bandwidth", sentence, advice, (rank,))


def _of(rank: int, links: Sequence[MeasuredLink]) -> list[MeasuredLink]:
    """Links from or to a rank."""
    return [link for link in links if rank in (link.source, link.target)]


def distance(found: Measurements) -> list[Finding]:
    links = [link for link in found.across() if link.latency_s is not None]
    if not links:
        return []
    trips = [link.latency_s or 0.0 for link in links]
    ranks = {end for link in links for end in (link.source, link.target)}
    middle = statistics.median(min(k.latency_s or 0.0 for k in _of(rank, links)) for rank in ranks)
    far = [link for link in links if (link.latency_s or 0.0) > max(FAR_S, FAR * middle)]
    if far and len(found.hosts) > 1:
        ends = Counter(end for link in far for end in (link.source, link.target))
        rank = max(sorted(ends), key=lambda r: ends[r])
        longest = max(link.latency_s or 0.0 for link in far)
        sentence = f"{found.name(rank)} is far from other workers: a round trip takes up to {latency_text(longest)}, "
        sentence += f"where {latency_text(middle)} is usual"
        return [Finding("note", "latency", sentence, "prefer rules that exchange once a block", (rank,))]
    return [Finding("good", "latency", f"{latency_text(min(trips))} to {latency_text(max(trips))} a round trip")]


def clocks(found: Measurements) -> list[Finding]:
    ahead = _ahead(found)
    if len(ahead) < 2:
        return []
    wrong = {rank: seconds for rank, seconds in ahead.items() if abs(seconds) > SKEW_S}
    if wrong:
        rank = max(wrong, key=lambda r: abs(wrong[r]))
        direction = "ahead" if wrong[rank] > 0 else "behind"
        more = f", and {len(wrong) - 1} more are wrong" if len(wrong) > 1 else ""
        sentence = f"the clock of {found.name(rank)} is {abs(wrong[rank]):.1f} s {direction}{more}"
        return [
            Finding(
                "note", "clocks", sentence, "run an NTP client there, or times in logs will not match", tuple(wrong)
            )
        ]
    most = max(ahead.values()) - min(ahead.values())
    return [Finding("good", "clocks", f"within {latency_text(most)} of each other")]


def _ahead(found: Measurements) -> dict[int, float]:
    """Offset of each clock from the median clock, as measured from and to the first rank."""
    first = min(found.machines, default=0)
    seen = {first: 0.0}
    for link in found.links:
        if link.clock_s is not None and link.target == first:
            seen.setdefault(link.source, -link.clock_s)
    seen |= {k.target: k.clock_s for k in found.links if k.clock_s is not None and k.source == first}
    middle = statistics.median_low(seen.values())
    return {rank: seconds - middle for rank, seconds in seen.items()}


SHM_BYTES = 256 << 20  # Docker gives 64 MB, which a few loaders fill
FILES = 1024
BYTES_A_PARAMETER = 16  # parameters, gradients, one moment of the optimizer, the exchange
SEVERITIES: dict[str, Severity] = {"paceline": "wrong", "torch": "wrong", "python": "note", "numpy": "note"}
"""Of different versions."""


def versions(found: Measurements) -> list[Finding]:
    findings: list[Finding] = []
    for what, severity in SEVERITIES.items():
        seen: dict[str, list[int]] = {}
        for rank, machine in sorted(found.machines.items()):
            seen.setdefault(machine.versions.get(what, "none"), []).append(rank)
        if len(seen) > 1:
            usual = max(seen, key=lambda version: len(seen[version]))
            odd = [rank for version, ranks in seen.items() if version != usual for rank in ranks]
            parts = "; ".join(f"{version}: {ranks_text(ranks)}" for version, ranks in seen.items())
            sentence = f"{what} differs ({parts})"
            advice = f"install {what} {usual} everywhere"
            findings.append(Finding(severity, "versions", sentence, advice, tuple(odd)))
    if findings or not found.machines:
        return findings
    one = next(iter(found.machines.values())).versions
    shown = ", ".join(f"{name} {one[name]}" for name in SEVERITIES if name in one)
    return [Finding("good", "versions", shown)]


def memory(found: Measurements, parameters: int | None) -> list[Finding]:
    known = {r: m for r, m in found.machines.items() if m.memory_bytes is not None}
    if not known:
        return []
    if parameters is not None:
        short = []
        for rank, machine in sorted(known.items()):
            here = sum(other.host == machine.host for other in found.machines.values())
            if (machine.memory_bytes or 0) < here * BYTES_A_PARAMETER * parameters:
                short.append(rank)
        if short:
            need = f"{BYTES_A_PARAMETER * parameters / 1e9:.1f} GB a worker"
            have = f"{(known[short[0]].memory_bytes or 0) / 1e9:.1f} GB"
            sentence = f"{found.names(short)}: {have} free for the workers of that host, where the model needs {need}"
            advice = "start fewer workers there, or stop other processes"
            return [Finding("wrong", "memory", sentence, advice, tuple(short))]
    least = min(machine.memory_bytes or 0 for machine in known.values())
    return [Finding("good", "memory", f"{least / 1e9:.1f} GB free or more on every host")]


def shared_memory(found: Measurements) -> list[Finding]:
    short = [r for r, m in sorted(found.machines.items()) if m.shm_bytes is not None and m.shm_bytes < SHM_BYTES]
    if not short:
        return []
    least = min(found.machines[r].shm_bytes or 0 for r in short)
    sentence = f"{found.names(short)}: only {least / 1e6:.0f} MB free in /dev/shm, which a DataLoader's workers share"
    return [Finding("note", "memory", sentence, "start the container with --shm-size=2g, or empty it", tuple(short))]


def files(found: Measurements) -> list[Finding]:
    need = max(FILES, 4 * found.size + 256)
    few = [r for r, m in sorted(found.machines.items()) if m.open_files is not None and 0 <= m.open_files < need]
    if not few:
        return []
    have = min(found.machines[r].open_files or 0 for r in few)
    sentence = f"{found.names(few)}: only {have} files and sockets may be open; use at least {need}"
    return [Finding("note", "files", sentence, f"ulimit -n {need}", tuple(few))]


def cores(found: Measurements) -> list[Finding]:
    findings = []
    for host in found.hosts:
        here = [m for m in found.machines.values() if m.host == host]
        cores, load = min(m.cores for m in here), max(m.load for m in here)
        if len(here) > cores and not here[0].gpus:
            sentence = f"{host} runs {len(here)} workers on {cores} core{'s' if cores > 1 else ''}"
            advice = "without GPUs, more workers than cores do not help"
            findings.append(Finding("note", "processors", sentence, advice))
        elif load > 0.5 * cores + len(here):
            sentence = f"{host} is busy: load {load:.1f} on {cores} cores"
            findings.append(Finding("note", "processors", sentence, "check which other processes run there"))
    return findings


def gpus(found: Measurements) -> list[Finding]:
    findings = []
    kinds = {host: next(m.gpus for m in found.machines.values() if m.host == host) for host in found.hosts}
    for host, gpus in kinds.items():
        workers = sum(m.host == host for m in found.machines.values())
        if gpus and workers > len(gpus):
            sentence = f"{host} has {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} for {workers} workers"
            findings.append(Finding("note", "GPUs", sentence, "start one worker for each GPU"))
    shown = {host: _gpu_text(gpus) for host, gpus in kinds.items()}
    if len(set(shown.values())) > 1:
        parts = "; ".join(f"{host}: {text}" for host, text in shown.items())
        findings.append(Finding("note", "GPUs", f"the hosts differ ({parts})", "the slowest GPU determines the speed"))
    if not findings and any(kinds.values()):
        findings.append(Finding("good", "GPUs", f"{next(iter(shown.values()))} on every host"))
    return findings


def _gpu_text(gpus: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpus).items()) or "none"


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
