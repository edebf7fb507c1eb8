# SPDX-License-Identifier: Apache-2.0
"""What was counted of a program alone and on several workers, side by side, and what is to be said of it.

Of N workers right is: each sample is drawn for training as often by all of them together as alone, and at its time;
each of evaluation as often by every worker; a worker makes 1/N of the steps at the rates of one; what all save at the
same moment is the same; the files are those of the program alone, each written by one.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _foreign.runs import Done, Program

OURS = re.compile(r"^(?:\[\d+\] )?paceline(?:_plugins)?\.[\w.]+: |^╭─ error ─", flags=re.MULTILINE)
"""A worker's refusal, or the command's own."""
SLACK = 0.12
"""Of an epoch's place in a training, as a share of it."""
LOOKS = 10
"""So many times the samples of passes that were left early are allowed for: loader processes fetch ahead."""


@dataclass
class Counts:
    """Of one worker."""

    items: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))  # of a data set, in their order
    passes: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))  # in which each item was drawn
    rates: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))  # of an optimizer's steps
    stepped: set[Any] = field(default_factory=set)  # passes in which steps were made
    over: set[Any] = field(default_factory=set)  # passes that came to their end
    saves: list[tuple[str, str]] = field(default_factory=list)
    writes: set[str] = field(default_factory=set)
    ends: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Of all optimizers."""
        return sum(map(len, self.rates.values()))


def read(folder: Path) -> dict[int, Counts]:
    """By rank."""
    found: dict[int, Counts] = defaultdict(Counts)
    for path in sorted(folder.glob("*.jsonl")):
        counts = found[int(path.name[:3])]
        for line in path.read_text(encoding="utf-8").splitlines():
            _take(counts, json.loads(line))
    return dict(found)


def _take(counts: Counts, event: dict[str, Any]) -> None:
    kind = event["k"]
    if kind == "item":
        counts.items[event["d"]].append(str(event["i"]))
        counts.passes[event["d"]].append(event["p"])
    elif kind == "step":
        counts.rates[event["o"]].append(event["lr"])
        counts.stepped.add(event["p"])
    elif kind == "over":
        counts.over.add(event["p"])
    elif kind == "save":
        counts.saves.append((event["path"], event["h"]))
    elif kind == "write":
        counts.writes.add(event["path"])
    elif kind == "end":
        counts.ends.append(event["h"])


def samples(alone: Counts, workers: list[Counts]) -> dict[str, dict[str, Any]]:
    """Of each data set: how often it was drawn from, and whether that is as it has to be."""
    names = dict.fromkeys([*alone.items, *(name for each in workers for name in each.items)])
    return {name: _samples(name, alone, workers) for name in names}


def _samples(name: str, alone: Counts, workers: list[Counts]) -> dict[str, Any]:
    trained, evaluated = _drawn(alone, name)
    each = [Counter(worker.items.get(name, [])) for worker in workers]
    together = sum(each, Counter[Any]())
    indices = set(trained) | set(evaluated) | set(together)
    wanted = sorted(trained[i] + len(workers) * evaluated[i] for i in indices)
    off = sum(abs(one - other) for one, other in zip(sorted(together[i] for i in indices), wanted, strict=True))
    short = {of for of, count in Counter(alone.passes.get(name, [])).items() if 2 * count < len(indices)}
    looked_at = [of for of in alone.passes.get(name, []) if of in short - alone.over - alone.stepped]
    return {
        "trained": sum(trained.values()),
        "evaluated": sum(evaluated.values()),
        "workers": [sum(one.values()) for one in each],
        "off": off,
        "right": off <= LOOKS * len(workers) * len(looked_at),
        "whole": bool(trained) and all(_histogram(one) == _histogram(trained + evaluated) for one in each),
        "late": _late(alone, workers, name) if not evaluated and _epochs(alone, name) else 0,
    }


def _drawn(alone: Counts, name: str) -> tuple[Counter[Any], Counter[Any]]:
    """Of one data set, for training and for evaluation."""
    trained, evaluated = Counter[Any](), Counter[Any]()
    for item, of in zip(alone.items.get(name, []), alone.passes.get(name, []), strict=True):
        (trained if of in alone.stepped else evaluated)[item] += 1
    return trained, evaluated


def _histogram(counter: Counter[Any]) -> Counter[int]:
    return Counter(counter.values())


def _epochs(alone: Counts, name: str) -> int:
    """How often each sample is trained from; 0 where they are drawn unlike each other."""
    times = set(_drawn(alone, name)[0].values())
    return times.pop() if len(times) == 1 else 0


def _late(alone: Counts, workers: list[Counts], name: str) -> int:
    """Draws in an epoch that is not theirs: the nth time of a sample belongs into the nth epoch."""
    epochs = _epochs(alone, name)
    places: dict[Any, list[float]] = defaultdict(list)
    for worker in workers:
        drawn = worker.items.get(name, [])
        for place, item in enumerate(drawn):
            places[item].append(place / len(drawn))
    return sum(
        not (nth / epochs - SLACK <= place <= (nth + 1) / epochs + SLACK)
        for each in places.values()
        for nth, place in enumerate(sorted(each))
    )


def steps(alone: Counts, workers: list[Counts]) -> dict[str, Any]:
    """How many, and at which rates: largest distance from the alone program's at the same part of the training."""
    count = len(workers)
    passes = max(1, len(alone.stepped), *(_epochs(alone, name) for name in alone.items))
    names = list(alone.rates)
    share = {name: [len(worker.rates.get(name, [])) for worker in workers] for name in names}
    right = all(abs(one - len(alone.rates[name]) / count) <= passes for name in names for one in share[name])
    off = max((_off(alone.rates[n], w.rates.get(n, []), passes) for n in names for w in workers), default=0.0)
    last = {
        name: [alone.rates[name][-1][0], *(w.rates[name][-1][0] for w in workers if w.rates.get(name))]
        for name in names
    }
    return {
        "alone": {name: len(alone.rates[name]) for name in names},
        "workers": share,
        "right": right,
        "whole": bool(names) and all(one == len(alone.rates[name]) for name in names for one in share[name]),
        "rates_off": off,
        "last_rates": last,
    }


def _off(alone: list[list[float]], worker: list[list[float]], passes: int) -> float:
    """Largest relative distance of a worker's rates from those around the same place of the training alone."""
    worst, slack = 0.0, 1 + len(alone) // max(1, len(worker))
    around = slack + len(alone) // (2 * passes * 4)
    for place, rates in enumerate(worker):
        middle = round(place * len(alone) / len(worker))
        near = alone[max(0, middle - around) : middle + around + 1]
        worst = max(worst, min(_apart(rates, each) for each in near))
    return worst


def _apart(one: list[float], other: list[float]) -> float:
    pairs = zip(one, other, strict=False)
    return max((abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in pairs), default=0.0)


def saved(alone: Counts, workers: list[Counts]) -> dict[str, Any]:
    """Whether what all save at the same moment is the same."""
    counts = [len(worker.saves) for worker in workers]
    same = [len({worker.saves[n][1] for worker in workers}) == 1 for n in range(min(counts, default=0))]
    return {"alone": len(alone.saves), "workers": counts, "same": sum(same), "right": all(same)}


def shared_writes(workers: list[Counts], folder: Path) -> list[str]:
    """Files of the program that several workers wrote."""
    times = Counter(path for worker in workers for path in worker.writes | {path for path, _ in worker.saves})
    return sorted(path for path, count in times.items() if count > 1 and path.startswith(str(folder / "work")))


def timeless(files: list[str]) -> set[str]:
    """Names without the times, and the process ids, that programs put into them."""
    return {re.sub(r"\d{4}-?\d\d-?\d\d[-_T]?\d\d[-:]?\d\d[-:]?\d\d|\d{5,}(\.\d+)*", "TIME", file) for file in files}


def figure(program: Program, done: Done) -> float | None:
    """The program's own, at the end."""
    found = re.findall(program.metric, done.output()) if program.metric else []
    return float(found[-1]) if found else None


def told(done: Done) -> list[str]:
    """What was said by us: lines of zero lines, and a refusal or an error."""
    output = done.output().replace(str(done.folder), "").splitlines()
    log = done.folder / "log" / "output" / "rank-000.err"
    logged = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    lines = [line for line in [*output, *logged] if line.startswith("paceline: ")]
    if done.code != 0:
        first = next((n for n, line in enumerate(output) if OURS.search(line)), max(0, len(output) - 12))
        lines += [line.strip("│ ")[:1000] for line in output[first : first + 12]]
    return lines


def judged(program: Program, alone: Done, several: Done) -> dict[str, Any]:
    """All that was counted, and a verdict."""
    one = read(alone.folder / "counts").get(0, Counts())
    by_rank = read(several.folder / "counts")
    workers = [by_rank[rank] for rank in sorted(by_rank)]
    found: dict[str, Any] = {
        "codes": [alone.code, several.code],
        "seconds": [round(alone.seconds, 1), round(several.seconds, 1)],
        "samples": samples(one, workers),
        "steps": steps(one, workers),
        "saves": saved(one, workers),
        "ends": [worker.ends for worker in workers],
        "files": {
            "missing": sorted(timeless(alone.files) - timeless(several.files)),
            "more": sorted(timeless(several.files) - timeless(alone.files)),
            "by_several": shared_writes(workers, several.folder),
        },
        "figure": [figure(program, alone), figure(program, several)],
        "told": told(several),
    }
    return found | {"verdict": verdict(found, sum(worker.steps for worker in workers), several)}


def verdict(found: dict[str, Any], made: int, several: Done) -> str:
    """In a word or a line."""
    alone_code, code = found["codes"]
    if alone_code != 0:
        return f"did not run alone: {alone_code}"
    if code is None:
        return "WRONG: hangs"
    if code != 0:
        when = "before training" if made == 0 else f"after {made} steps"
        return f"refused {when}" if OURS.search(several.output()) else f"WRONG: crash {when}"
    if not found["steps"]["alone"]:
        return "LOOK: no step of an optimizer of torch, and exit code 0"
    if found["steps"]["whole"] and any(each["whole"] for each in found["samples"].values()):
        return "WRONG: the whole job on every worker"
    faults = [f"samples of {name}" for name, each in found["samples"].items() if not each["right"] or each["late"]]
    faults += [] if found["steps"]["right"] else ["steps"]
    faults += [] if found["steps"]["rates_off"] < 0.02 else ["rates"]
    faults += [] if found["saves"]["right"] else ["what is saved"]
    faults += [] if len(set(map(tuple, found["ends"]))) <= 1 else ["the model at the end"]
    faults += [f"files {what}" for what, names in found["files"].items() if names]
    return "right" if not faults else "LOOK: " + ", ".join(faults)
