# SPDX-License-Identifier: Apache-2.0
"""What the storm cost: useful work, recovery, and which faults the logs name."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from _faults.count import Books, Exchange
from _faults.storm import Fault

WINDOW_S, START_S = 15.0, 60.0  # within which a log names a fault, and a host that comes
Event = dict[str, Any]


def lives(books: Books, events: list[Event], faults: list[Fault]) -> dict[int, list[tuple[float, float]]]:
    """Worker -> the times in which it could work: it has begun, holds the model, runs, and is reached.

    A life begins when `attach` gave the program its model: starting a process, importing torch and waiting to be
    taken in are not in it. It ends with the worker's death, with the beginning of the fault by which it was lost, or
    when there was no data left for it. A stop or a cut that it survives is left out of it.
    """
    lost = {line["worker"]: line["at"] for line in events if line["kind"] == "lost"}
    found = {}
    for worker, lines in books.items():
        started = next((line["at"] for line in lines if line["event"] == "started"), None)
        if started is None:
            continue
        over = next((line["at"] for line in lines if line["event"] == "through"), lines[-1]["at"])
        own = [fault for fault in faults if fault.worker == worker and fault.kind in ("kill", "stop", "cut", "leave")]
        end = min([over, lost.get(worker, over), *(f.at for f in own if f.kind in ("kill", "leave"))])
        away = [(f.at, f.until) for f in own if f.kind in ("stop", "cut") and f.at < end]
        if worker in lost:
            end = min([end, *(since for since, until in away if since <= lost[worker] <= until + WINDOW_S)])
        found[worker] = _without(started, end, away)
    return found


def _without(begin: float, end: float, away: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """[begin, end] less the times away."""
    found = []
    for since, until in sorted(away):
        if since > begin:
            found.append((begin, min(since, end)))
        begin = max(begin, until)
    return [*found, (begin, end)] if end > begin else found


def used_time(merged: int, minibatch_s: float, spans: dict[int, list[tuple[float, float]]]) -> tuple[float, float]:
    """Part of the workers' time that went into the global model; and that time, in seconds."""
    lived = sum(max(0.0, end - begin) for own in spans.values() for begin, end in own)
    return (merged * minibatch_s / lived if lived else 0.0), lived


def recoveries(found: dict[int, Exchange], events: list[Event]) -> list[dict[str, float]]:
    """For every loss: seconds from when it was seen, or from when the last survivor came if that was later, until all
    survivors had made the exchange; `waiting` says that all had come before it was seen."""
    rows = []
    whole = [one for _, one in sorted(found.items()) if one.over]
    for line in events:
        if line["kind"] != "lost":
            continue
        following = next((one for one in whole if one.done > line["at"]), None)
        if following is None:
            continue
        arrival = following.last_arrival
        rows.append(
            {
                "worker": line["worker"],
                "exchange": following.number,
                "seconds": round(following.done - max(arrival, line["at"]), 4),
                "waiting": arrival <= line["at"],
                "waited_s": round(max(0.0, line["at"] - arrival), 3),
            }
        )
    return rows


def calm_exchanges(found: dict[int, Exchange], events: list[Event], faults: list[Fault]) -> list[float]:
    """Seconds from the last arrival to the end, of exchanges that nothing happened to."""
    troubled = [(line["at"], line["at"]) for line in events if line["kind"] in ("lost", "generation")]
    troubled += [(fault.at, fault.until) for fault in faults]
    rows = []
    for one in found.values():
        if not one.over:
            continue
        begin, end = min(one.arrived.values()), one.done
        if not any(since <= end and until >= begin for since, until in troubled):
            rows.append(end - one.last_arrival)
    return rows


def spread(values: list[float]) -> dict[str, float]:
    """Median and worst."""
    if not values:
        return {}
    return {"median": round(statistics.median(values), 4), "worst": round(max(values), 4), "count": len(values)}


def naming(faults: list[Fault], events: list[Event], journals: list[Event]) -> None:
    """Find for each fault the line of a log that names it, and note it there as `line`; "" where none does."""
    for fault in faults:
        fault.about["line"] = _line(fault, events, journals)


def _line(fault: Fault, events: list[Event], journals: list[Event]) -> str:
    window_s = START_S if fault.kind == "join" else WINDOW_S
    soon = [line for line in events if fault.at - 0.5 <= line["at"] <= fault.until + window_s]
    if fault.kind == "checkpoint":
        return "the program that resumed named the step" if fault.about.get("named") else ""
    if fault.kind == "nan":
        found = [line for line in soon if line["kind"] == "returned" and line["worker"] == fault.worker]
        found += [line for line in journals if line.get("left_out") and _close(fault, line)]
    elif fault.kind in ("join", "launcher"):
        kind, host = ("joined", f"host{fault.host}") if fault.kind == "join" else ("back", None)
        found = [line for line in soon if line["kind"] == kind and host in (None, line.get("host"))]
    else:
        ways = ("lost", "left") if fault.kind == "leave" else ("lost",)
        found = [line for line in soon if line["kind"] in ways and line.get("worker") == fault.worker]
        found += [line for line in journals if line.get("waited_for") == fault.worker and _close(fault, line)]
    return json.dumps(found[0]) if found else ""


def _close(fault: Fault, line: Event) -> bool:
    return bool(fault.at - 0.5 <= line["at"] <= fault.until + WINDOW_S)


def journals(logs: list[Path]) -> list[Event]:
    """The workers' own event logs; `at` is in seconds of the wall clock."""
    rows = []
    for log in logs:
        for path in sorted(log.glob("rank-*.jsonl")):
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            began = next((line["unix_s"] - line["at_s"] for line in lines if line["kind"] == "attach"), 0.0)
            rows += [{**line, "at": began + line["at_s"], "file": path.name} for line in lines]
    return rows


def timeline(
    spans: dict[int, list[tuple[float, float]]], hosts: dict[int, int], found: dict[int, Exchange], faults: list[Fault]
) -> dict[str, Any]:
    """For a picture: lives, faults and exchanges, in seconds since the first worker began."""
    zero = min(begin for own in spans.values() for begin, _ in own)
    whole = [one for _, one in sorted(found.items()) if one.over]
    return {
        "lives": {w: [(round(a - zero, 2), round(b - zero, 2)) for a, b in own] for w, own in spans.items()},
        "hosts": hosts,
        "faults": [
            {"kind": f.kind, "at": round(f.at - zero, 2), "until": round(f.until - zero, 2), "host": f.host}
            for f in faults
        ],
        "exchanges": [
            {
                "at": round(one.done - zero, 2),
                "took_s": round(one.done - one.last_arrival, 3),
                "waited_s": round(one.done - min(one.arrived.values()), 3),
            }
            for one in whole
        ],
    }
