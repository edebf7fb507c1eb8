# SPDX-License-Identifier: Apache-2.0
"""A worker's chain of receipts: lines of canonical JSON, each with the SHA-256 of the line before it.

======== ==============================================================================================================
`start`  the settings, versions and machine, and the digests of the model with which the worker begins
`merge`  number `n` of the exchange, `fragment` (-1 where gradients are exchanged), `given`: the digest of what the
         worker brought, `model`: of parameters and outer state after it, `work`: each worker's minibatches and weight,
         `places`: of the data, whose work this merge brought in, `unknown`: batches whose places are not known
`resume` the worker goes on from the state after exchange `n`, whose digests are `models`
`end`    the run ended in order
======== ==============================================================================================================

Every line has its number `line`, from 1, and `prev`. A line is altered, removed or moved only if all later ones are
written anew; the seal holds the hash of the last one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIRST = ""
"""`prev` of the first line."""
MOST_WORKERS = 1 << 20
"""A chain that says more is none."""


def chain_name(rank: int) -> str:
    """File name of a worker's chain."""
    return f"rank-{rank:03d}.jsonl"


def canonical(line: Mapping[str, Any]) -> str:
    """The line's text: one for one content."""
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False)


def hash_of(text: str) -> str:
    """The hash by which the next line, or the seal, names this line."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Chain:
    """The chain of one worker, as it was read."""

    rank: int  # the worker
    lines: list[dict[str, Any]] = field(default_factory=list)  # those that follow from one another
    count: int = 0  # how many lines the file has
    head: str = FIRST  # hash of the last line
    problems: list[str] = field(default_factory=list)  # sentences about what is wrong

    @property
    def start(self) -> dict[str, Any]:
        """The settings of the last start."""
        return [line for line in self.lines if line["kind"] == "start"][-1]

    @property
    def merges(self) -> dict[int, dict[str, Any]]:
        """Number of the exchange -> its line, of the merges that count: those that a later start or resume went back
        behind do not."""
        before, now = dict[int, dict[str, Any]](), dict[int, dict[str, Any]]()
        for line in self.lines:
            if line["kind"] == "start":
                before, now = before | now, {}
            elif line["kind"] == "resume":
                now = {n: one for n, one in (before | now).items() if n <= line["n"]}
            elif line["kind"] == "merge":
                now[line["n"]] = line
        return now

    @property
    def begins_at(self) -> int:
        """Number of the exchange after which its last start, or the resume after it, goes on."""
        return next((line["n"] for line in reversed(self.lines) if line["kind"] == "resume"), 0)

    @property
    def models_begun(self) -> dict[str, str]:
        """Fragment -> digest of the state with which it begins there."""
        resumes = [line["models"] for line in self.lines if line["kind"] == "resume"]
        return dict(resumes[-1] if resumes else self.start["models"])

    def models_at(self, n: int) -> dict[str, str]:
        """Fragment -> digest of its state after exchange `n`, as far as it is known."""
        found = dict(self.start["models"]) if not self.foreign else {}
        found |= {str(one["fragment"]): one["model"] for number, one in sorted(self.merges.items()) if number <= n}
        return found

    @property
    def foreign(self) -> bool:
        """Whether it goes on from a state that it has no receipts of."""
        last = 0
        for line in self.lines:
            if line["kind"] == "merge":
                last = max(last, line["n"])
            elif line["kind"] == "resume" and line["n"] > last:
                return True
        return False


def read(path: Path, rank: int) -> Chain:
    """The chain in a file; what is wrong with it is in `problems`, in words.

    Raises:
        OSError: it cannot be read.
    """
    chain, name = Chain(rank), path.name
    texts = path.read_bytes().decode("utf-8", errors="replace").split("\n")
    if texts.pop():
        chain.problems.append(f"{name} ends within a line: its worker was killed, or the file was cut")
    chain.count = len(texts)
    chain.head = hash_of(texts[-1]) if texts else FIRST
    previous = FIRST
    for number, text in enumerate(texts, 1):
        line = _line(text)
        why = _why_not(line, number, previous)
        if why:
            chain.problems.append(f"{name}, line {number}: {why}")
            break
        assert line is not None
        chain.lines.append(line)
        previous = hash_of(text)
    if not chain.problems and not chain.lines:
        chain.problems.append(f"{name} is empty")
    return chain


def _why_not(line: dict[str, Any] | None, number: int, previous: str) -> str:
    """Why a line is none that could stand there; "" if it is one."""
    if line is None:
        return "it is no receipt"
    if line["kind"] == "gap":
        return f"{line.get('events')} receipts are missing before it, since the disk was full"
    if not _has_form(line):
        return "it is no receipt of this version: fields are missing, or are of the wrong kind"
    if line["line"] != number:
        return f"it was line {line['line']}: lines were removed, moved or put in"
    if line["prev"] != previous:
        return f"line {number - 1} was altered after it was written, for its hash is not the one in this line"
    if (number == 1) != (line["prev"] == FIRST) or (number == 1 and line["kind"] != "start"):
        return "a chain begins with a start and nowhere else"
    return ""


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    return line


_FORMS: dict[str, dict[str, type]] = {
    "start": {
        "job": str,
        "authority": str,
        "rank": int,
        "size": int,
        "settings": dict,
        "machine": dict,
        "models": dict,
    },
    "merge": {
        **dict.fromkeys(("n", "fragment", "steps", "unknown"), int),
        **dict.fromkeys(("given", "model"), str),
        **dict.fromkeys(("work", "places"), list),
    },
    "resume": {"n": int, "models": dict},
    "end": {"places": list, "unknown": int},
}


def _has_form(line: dict[str, Any]) -> bool:
    form = _FORMS.get(line["kind"])
    if form is None or not all(type(line.get(name)) is kind for name, kind in form.items()):
        return False
    if type(line.get("line")) is not int or type(line.get("prev")) is not str:
        return False
    if line["kind"] == "start" and not (0 < line["size"] <= MOST_WORKERS and type(line["settings"].get("rule")) is str):
        return False
    if not all(isinstance(one, str) for one in line.get("models", {}).values()):
        return False
    return all(map(_is_row, line.get("places", []))) and all(map(_is_work, line.get("work", [])))


def _is_row(row: Any) -> bool:
    """Whether it is a row of places."""
    if not isinstance(row, list) or len(row) != 6 or not all(type(row[k]) is int for k in (0, 1, 2, 4, 5)):
        return False
    if not isinstance(row[3], list) or not 0 <= row[4] < row[5]:
        return False
    return all(
        isinstance(one, list) and len(one) == 2 and all(type(end) is int for end in one) and one[0] < one[1]
        for one in row[3]
    )


def _is_work(row: Any) -> bool:
    """Whether it is a worker's minibatches and weight."""
    return isinstance(row, list) and len(row) == 2 and type(row[0]) is int and isinstance(row[1], (int, float))
