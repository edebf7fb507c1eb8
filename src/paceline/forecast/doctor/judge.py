# SPDX-License-Identifier: Apache-2.0
"""What the measurements mean: findings, each with a sentence and what to do. Nothing here measures anything.

`wrong` is what would stop a run or make it wait for one slow part; `note` is what a person should know; `good` is what
was looked at and found in order. A cluster is fit where nothing is wrong.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.forecast.doctor.measured import Link, Measurements

Severity = Literal["wrong", "note", "good"]
SLOW = 0.5  # of the median speed
FAR, FAR_S = 5.0, 1e-3  # times the median round trip, and at least so long
SKEW_S = 0.5
SHM_BYTES = 256 << 20  # Docker gives 64 MB, which a few loaders fill
FILES = 1024
BYTES_A_PARAMETER = 16  # parameters, gradients, one moment of the optimizer, the exchange
ASK = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: `wrong`, `note` or `good`.
        about: what was looked at, one word or two.
        sentence: what is the case, with names and numbers.
        advice: what to do; empty where nothing is to be done.
        ranks: whom it concerns.
    """

    severity: Severity
    about: str
    sentence: str
    advice: str = ""
    ranks: tuple[int, ...] = ()


def judge(found: Measurements, parameters: int | None = None) -> list[Finding]:
    """All findings, what is wrong first.

    Args:
        found: what was measured.
        parameters: of the model that is to be trained, where known.
    """
    rules: list[Callable[[Measurements], list[Finding]]] = [
        _attendance,
        _reach,
        _gloo,
        _speed,
        _distance,
        _clocks,
        _versions,
        lambda m: _memory(m, parameters),
        _shared_memory,
        _files,
        _cores,
        _gpus,
    ]
    findings = [finding for rule in rules for finding in rule(found)]
    order = {"wrong": 0, "note": 1, "good": 2}
    return sorted(findings, key=lambda finding: order[finding.severity])


def fit(findings: Sequence[Finding]) -> bool:
    """Whether training can begin."""
    return not any(finding.severity == "wrong" for finding in findings)


def slowest_bytes_s(found: Measurements) -> float | None:
    """Speed of the slowest link between hosts (of a single host: between workers)."""
    return min(_speeds(found.across()), default=None)


def exchange_s(found: Measurements, parameters: int) -> float | None:
    """Seconds of one exchange of an fp32 model: 2 (N-1)/N * 4 P bytes over the slowest link."""
    slowest = slowest_bytes_s(found)
    if not slowest:
        return None
    return 2 * (found.size - 1) / found.size * 4 * parameters / slowest


def rate_text(bytes_s: float) -> str:
    """A speed as networks give it: `940 Mbit/s`."""
    mbit = 8 * bytes_s / 1e6
    return (
        f"{mbit / 1000:.1f} Gbit/s" if mbit >= 9999.5 else f"{mbit:.0f} Mbit/s" if mbit >= 10 else f"{mbit:.1f} Mbit/s"
    )


def latency_text(seconds: float) -> str:
    """A round trip: `0.12 ms`."""
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


# ---- who is here, and who reaches whom ------------------------------------------------------------------------------


def _attendance(found: Measurements) -> list[Finding]:
    findings = []
    if found.missing:
        several = len(found.missing) > 1
        findings.append(
            Finding(
                "wrong",
                "workers",
                f"{_ranks(found.missing)} did not come within {found.timeout_s:g} s",
                f"start {'them' if several else 'it'}; if {'they say' if several else 'it says'} that MASTER_ADDR "
                "cannot be reached, open that port on the host of rank 0",
                tuple(found.missing),
            )
        )
    if found.lost:
        findings.append(
            Finding(
                "wrong",
                "workers",
                f"{found.names(found.lost)} came and then stopped answering",
                "look at what it printed, and whether its host is up and its link does not drop out",
                tuple(found.lost),
            )
        )
    if not findings:
        hosts = len(found.hosts)
        findings.append(Finding("good", "workers", f"all {found.size} came, on {hosts} host{'s' if hosts > 1 else ''}"))
    return findings


def _reach(found: Measurements) -> list[Finding]:
    """Ranks that are cut off are named as such; what is left are pairs."""
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


def _culprit(broken: Sequence[Link], present: int) -> tuple[int, str | None]:
    """A rank that explains several broken links, and how: it hears nobody, or is heard by nobody, or both."""
    others = present - 1
    ins = _count(link.target for link in broken)
    outs = _count(link.source for link in broken)
    ranks = sorted({*ins, *outs}, key=lambda r: (-ins.get(r, 0) - outs.get(r, 0), r))
    for rank in ranks:
        inward, outward = ins.get(rank, 0) >= others, outs.get(rank, 0) >= others
        if others > 1 and (inward or outward):
            return rank, "both" if inward and outward else "in" if inward else "out"
    return -1, None


def _cut_off(found: Measurements, rank: int, how: str, broken: Sequence[Link]) -> Finding:
    mine = [link for link in broken if rank in (link.source, link.target)]
    said = mine[0].problem
    sentence = {
        "both": f"{found.name(rank)} reaches nobody, and nobody reaches it",
        "in": f"nobody reaches {found.name(rank)}, while it reaches others",
        "out": f"{found.name(rank)} reaches nobody, while others reach it",
    }[how]
    return Finding("wrong", "connections", f"{sentence} ({said})", _open(found, rank, said), (rank,))


def _pairs(found: Measurements, broken: Sequence[Link]) -> list[Finding]:
    """A pair that is broken both ways is one finding."""
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
        findings.append(Finding("wrong", "connections", sentence, _open(found, target, link.problem), (source, target)))
    return findings


def _open(found: Measurements, rank: int, said: str) -> str:
    machine = found.machines[rank]
    others = [n for n, a in machine.interfaces.items() if not a.startswith("127.") and n != machine.gloo_interface]
    beside = f"; or set {ASK}, there, to an interface that the others reach ({', '.join(others)})" if others else ""
    if "refused" in said:
        return f"the address leads elsewhere or is blocked: see that {machine.host} has one name and address{beside}"
    return (
        "a firewall or a route drops it, which `ip route get ADDRESS` tells apart: gloo listens on ports of the "
        f"system's choice, so let the cluster's hosts reach every TCP port of {machine.host}{beside}"
    )


def _gloo(found: Measurements) -> list[Finding]:
    """Whether gloo, which nobody tells, will take an address that the others reach."""
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
        sentence = f"on {machine.host} its own name leads to no address, so gloo would not know where to listen"
    elif address.startswith("127."):
        sentence = (
            f"on {machine.host} its own name leads to {address}, which no other host can reach; gloo would take it"
        )
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
    sentence = f"{_hosts(several)} could take several interfaces ({shown}); gloo takes {one.gloo_interface or '?'}"
    return [Finding("note", "interface", sentence, f"if that is not the fast one, set {ASK}")]


# ---- speed, distance, clocks ----------------------------------------------------------------------------------------


def _speed(found: Measurements) -> list[Finding]:
    links = [link for link in found.across() if link.bandwidth_bytes_s]
    if not links:
        return []
    usual = _usual(links)
    slow = [link for link in links if (link.bandwidth_bytes_s or 0) < SLOW * usual]
    if slow and len(found.hosts) > 1:
        return _slow(found, slow, links, usual)
    slowest, fastest = min(_speeds(links)), max(_speeds(links))
    span = rate_text(slowest) if slowest == fastest else f"{rate_text(slowest)} to {rate_text(fastest)}"
    return [Finding("good", "bandwidth", span)]


def _usual(links: Sequence[Link]) -> float:
    """What a worker can have: the median over the workers of their best link. The median over the links would be that
    of the slow ones as soon as one of three hosts is slow."""
    ranks = {end for link in links for end in (link.source, link.target)}
    return statistics.median(max(_speeds(_of(rank, links))) for rank in ranks)


def _slow(found: Measurements, slow: Sequence[Link], links: Sequence[Link], usual: float) -> list[Finding]:
    """Name the ranks that are slow with everybody, and for what is left the links."""
    findings, left = [], list(slow)
    while left:
        ends = {end for link in left for end in (link.source, link.target)}
        rank = max(sorted(ends), key=lambda r: (len(_of(r, left)) / len(_of(r, links)), len(_of(r, left))))
        if len(_of(rank, left)) < len(_of(rank, links)) and len(_of(rank, left)) <= 2:
            break
        findings.append(_slow_rank(found, rank, _of(rank, left), usual))
        left = [link for link in left if rank not in (link.source, link.target)]
    for link in left:
        says = (
            f"{found.name(link.source)} sends to {found.name(link.target)} at {rate_text(link.bandwidth_bytes_s or 0)}"
        )
        sentence = f"{says}, where {rate_text(usual)} is usual"
        concerned = (link.source, link.target)
        findings.append(Finding("wrong", "bandwidth", sentence, "look at the way between these two", concerned))
    return findings


def _slow_rank(found: Measurements, rank: int, links: Sequence[Link], usual: float) -> Finding:
    out, into = ([k for k in links if getattr(k, end) == rank] for end in ("source", "target"))
    ways = [f"sends at {rate_text(_middle(out))}"] if out else []
    ways += [f"receives at {rate_text(_middle(into))}"] if into else []
    sentence = f"{found.name(rank)} {' and '.join(ways)}, where {rate_text(usual)} is usual"
    advice = (
        "every synchronous exchange runs at the speed of the slowest link: look at its cable, switch port and duplex, "
        "and at what else uses it"
    )
    return Finding("wrong", "bandwidth", sentence, advice, (rank,))


def _of(rank: int, links: Sequence[Link]) -> list[Link]:
    """Those that begin or end at a rank."""
    return [link for link in links if rank in (link.source, link.target)]


def _distance(found: Measurements) -> list[Finding]:
    links = [link for link in found.across() if link.latency_s is not None]
    if not links:
        return []
    trips = [link.latency_s or 0.0 for link in links]
    ranks = {end for link in links for end in (link.source, link.target)}
    middle = statistics.median(min(k.latency_s or 0.0 for k in _of(rank, links)) for rank in ranks)
    far = [link for link in links if (link.latency_s or 0.0) > max(FAR_S, FAR * middle)]
    if far and len(found.hosts) > 1:
        ends = _count(end for link in far for end in (link.source, link.target))
        rank = max(sorted(ends), key=lambda r: ends[r])
        longest = max(link.latency_s or 0.0 for link in far)
        sentence = f"{found.name(rank)} is far from the others: a round trip takes up to {latency_text(longest)}, "
        sentence += f"where {latency_text(middle)} is usual"
        return [Finding("note", "latency", sentence, "prefer rules that exchange once a block", (rank,))]
    return [Finding("good", "latency", f"{latency_text(min(trips))} to {latency_text(max(trips))} a round trip")]


def _clocks(found: Measurements) -> list[Finding]:
    ahead = _ahead(found)
    if len(ahead) < 2:
        return []
    wrong = {rank: seconds for rank, seconds in ahead.items() if abs(seconds) > SKEW_S}
    if wrong:
        rank = max(wrong, key=lambda r: abs(wrong[r]))
        way = "ahead" if wrong[rank] > 0 else "behind"
        more = f", and {len(wrong) - 1} more are off" if len(wrong) > 1 else ""
        sentence = f"the clock of {found.name(rank)} is {abs(wrong[rank]):.1f} s {way}{more}"
        return [Finding("note", "clocks", sentence, "run an NTP client there, or logs will not fit", tuple(wrong))]
    most = max(ahead.values()) - min(ahead.values())
    return [Finding("good", "clocks", f"within {latency_text(most)} of each other")]


def _ahead(found: Measurements) -> dict[int, float]:
    """How much each clock is ahead of the middle one, as rank 0 (or the first that came) sees them."""
    first = min(found.machines, default=0)
    seen = {first: 0.0}
    for link in found.links:
        if link.clock_s is not None and link.target == first:
            seen.setdefault(link.source, -link.clock_s)
    seen |= {k.target: k.clock_s for k in found.links if k.clock_s is not None and k.source == first}
    middle = statistics.median_low(seen.values())
    return {rank: seconds - middle for rank, seconds in seen.items()}


# ---- what is installed, and what is left of the machines ------------------------------------------------------------


def _versions(found: Measurements) -> list[Finding]:
    findings: list[Finding] = []
    for what, severity in (("paceline", "wrong"), ("torch", "wrong"), ("python", "note"), ("numpy", "note")):
        seen: dict[str, list[int]] = {}
        for rank, machine in sorted(found.machines.items()):
            seen.setdefault(machine.versions.get(what, "none"), []).append(rank)
        if len(seen) > 1:
            usual = max(seen, key=lambda version: len(seen[version]))
            odd = [rank for version, ranks in seen.items() if version != usual for rank in ranks]
            parts = "; ".join(f"{version}: {_ranks(ranks)}" for version, ranks in seen.items())
            sentence = f"{what} differs ({parts})"
            findings.append(
                Finding(_severity(severity), "versions", sentence, f"install {what} {usual} everywhere", tuple(odd))
            )
    if findings or not found.machines:
        return findings
    one = next(iter(found.machines.values())).versions
    shown = ", ".join(f"{name} {one[name]}" for name in ("paceline", "torch", "python", "numpy") if name in one)
    return [Finding("good", "versions", shown)]


def _severity(text: str) -> Severity:
    return "wrong" if text == "wrong" else "note"


def _memory(found: Measurements, parameters: int | None) -> list[Finding]:
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
            sentence = f"{found.names(short)}: {have} free for the workers of that host, where the model wants {need}"
            advice = "start fewer workers there, or end what else runs"
            return [Finding("wrong", "memory", sentence, advice, tuple(short))]
    least = min(machine.memory_bytes or 0 for machine in known.values())
    return [Finding("good", "memory", f"{least / 1e9:.1f} GB free or more on every host")]


def _shared_memory(found: Measurements) -> list[Finding]:
    short = [r for r, m in sorted(found.machines.items()) if m.shm_bytes is not None and m.shm_bytes < SHM_BYTES]
    if not short:
        return []
    least = min(found.machines[r].shm_bytes or 0 for r in short)
    sentence = f"{found.names(short)}: only {least / 1e6:.0f} MB free in /dev/shm, which a DataLoader's workers share"
    return [Finding("note", "memory", sentence, "start the container with --shm-size=2g, or empty it", tuple(short))]


def _files(found: Measurements) -> list[Finding]:
    need = max(FILES, 4 * found.size + 256)
    few = [r for r, m in sorted(found.machines.items()) if m.open_files is not None and 0 <= m.open_files < need]
    if not few:
        return []
    have = min(found.machines[r].open_files or 0 for r in few)
    sentence = f"{found.names(few)}: only {have} files and sockets may be open, where {need} are wise"
    return [Finding("note", "files", sentence, f"ulimit -n {need}", tuple(few))]


def _cores(found: Measurements) -> list[Finding]:
    findings = []
    for host in found.hosts:
        here = [m for m in found.machines.values() if m.host == host]
        cores, load = min(m.cores for m in here), max(m.load for m in here)
        if len(here) > cores and not here[0].gpus:
            sentence = f"{host} runs {len(here)} workers on {cores} core{'s' if cores > 1 else ''}"
            findings.append(
                Finding("note", "processors", sentence, "without GPUs, more workers than cores do not help")
            )
        elif load > 0.5 * cores + len(here):
            sentence = f"{host} is busy: load {load:.1f} on {cores} cores"
            findings.append(Finding("note", "processors", sentence, "see what else runs there"))
    return findings


def _gpus(found: Measurements) -> list[Finding]:
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
        findings.append(Finding("note", "GPUs", f"the hosts differ ({parts})", "the slowest sets the pace"))
    if not findings and any(kinds.values()):
        findings.append(Finding("good", "GPUs", f"{next(iter(shown.values()))} on every host"))
    return findings


def _gpu_text(gpus: Sequence[str]) -> str:
    counts = {name: list(gpus).count(name) for name in gpus}
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


# ---- small things ---------------------------------------------------------------------------------------------------


def _speeds(links: Iterable[Link]) -> list[float]:
    return [link.bandwidth_bytes_s for link in links if link.bandwidth_bytes_s]


def _middle(links: Sequence[Link]) -> float:
    return statistics.median(_speeds(links))


def _count(ranks: Iterable[int]) -> dict[int, int]:
    counted: dict[int, int] = {}
    for rank in ranks:
        counted[rank] = counted.get(rank, 0) + 1
    return counted


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _hosts(machines: Sequence[object]) -> str:
    return ", ".join(dict.fromkeys(str(getattr(machine, "host", "")) for machine in machines))
