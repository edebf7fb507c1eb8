# SPDX-License-Identifier: Apache-2.0
"""Compares the receipts of a run with those of a run that made the same exchanges again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_plugins.receipts.chain import Chain

Lines = Mapping[int, Mapping[int, Mapping[str, Any]]]
"""Worker -> exchange -> its line."""
MACHINE = {
    "cpu": "processor",
    "capability": "vector instructions",
    "arch": "architecture",
    "threads": "number of threads",
    "devices": "devices",
    "torch": "version of torch",
}
"""What decides how floating-point sums are rounded."""


def other_machine(recorded: Sequence[Chain], again: Sequence[Chain]) -> list[str]:
    """In what the machines differ, in words; empty if bits must be the same."""
    found = dict[str, None]()
    there = again[0].start["machine"]
    for one in recorded:
        machine = one.start["machine"]
        for key, what in MACHINE.items():
            if machine.get(key) != there.get(key):
                found[f"{what}: {machine.get(key)} then, {there.get(key)} here"] = None
    return list(found)


def first_difference(recorded: Sequence[Chain], again: Sequence[Chain], last: int) -> tuple[int, str] | None:
    """(exchange, what differs there, in words) of the first exchange up to `last` that came out otherwise, or None."""
    here = {one.rank: one.merges for one in again}
    then = {one.rank: one.merges for one in recorded}
    first = min(set().union(*then.values()), default=0)  # a chain may go on from another one
    for n in sorted(n for n in set().union(*here.values()) if first <= n <= last):
        why = _difference(n, then, here)
        if why:
            return n, why
    return None


def compared(again: Sequence[Chain]) -> list[int]:
    """The exchanges that were made again."""
    return sorted(set().union(*(one.merges for one in again)))


def _difference(n: int, then: Lines, here: Lines) -> str:
    pairs = {rank: (then.get(rank, {}).get(n), table[n]) for rank, table in here.items() if n in table}
    missing = [rank for rank, (was, _) in pairs.items() if was is None]
    if missing:
        return f"worker {_listed(missing)} has no receipt of it"
    for name, what in (
        ("places", "trained on other samples than its receipt says"),
        ("given", "brought something else than its samples give: its memory or its processor was faulty in that block"),
    ):
        odd = [rank for rank, (was, now) in pairs.items() if was is not None and was[name] != now[name]]
        if odd:
            return f"worker {_listed(odd)} {what}"
    odd = [rank for rank, (was, now) in pairs.items() if was is not None and was["model"] != now["model"]]
    if odd and len(odd) < len(pairs):
        return f"worker {_listed(odd)} holds another model after it than the same contributions give"
    if odd:
        bare = not any(now["given"] for _, now in pairs.values())
        cause = "a worker's gradients, the sum or the step" if bare else "the sum or the outer step"
        return f"all workers hold another model after it than the same samples give: {cause} went wrong"
    return ""


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
