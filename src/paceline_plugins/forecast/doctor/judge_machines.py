# SPDX-License-Identifier: Apache-2.0
"""Findings about the machines: installed versions, memory, files, cores and GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline_plugins.forecast.doctor.finding import Finding, Severity, ranks_text
from paceline_plugins.forecast.doctor.measured import Measurements

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
