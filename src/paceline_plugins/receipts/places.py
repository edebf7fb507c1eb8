# SPDX-License-Identifier: Apache-2.0
"""Exactly once: whether the places in receipts are disjoint, and cover each pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

SHARD = 1 << 40
"""Places of a shard of unknown length (:mod:`paceline.data.sampling.shard_progress`)."""
MOST_TOLD = 3
"""Double places that are named."""


@dataclass
class Pass:
    """What the receipts say of one pass over the data of a loader.

    Attributes:
        total: its places; -1 if its length is not known.
        given: (begin, end, worker, exchange), as they came.
        parts: (begin, end, of n) -> (part, worker, exchange), of batches that several workers shared.
        refused: places in contributions that were left out of the mean.
    """

    total: int = -1
    given: list[tuple[int, int, int, int]] = field(default_factory=list)
    parts: dict[tuple[int, int, int], list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    refused: int = 0


@dataclass(frozen=True)
class Count:
    """The result of a count.

    Attributes:
        problems: places that came twice, or never in a pass that is over.
        notes: what each pass has, in words.
        unknown: batches whose places are not known.
    """

    problems: list[str]
    notes: list[str]
    unknown: int


def count(merges: Mapping[int, Iterable[dict[str, Any]]], partial: bool = False) -> Count:
    """Count the places in the merges that count.

    Args:
        merges: worker -> its lines with places.
        partial: whether the run went on from a state without receipts, so that first passes may lack places.
    """
    passes: dict[tuple[int, int], Pass] = defaultdict(Pass)
    unknown = 0
    for worker, lines in merges.items():
        for line in lines:
            unknown += line["unknown"]
            for loader, epoch, total, ranges, part, parts in line["places"]:
                _add(passes[loader, epoch], total, ranges, (part, parts), worker, line)
    problems, notes = list[str](), list[str]()
    last = {loader: epoch for loader, epoch in sorted(passes)}
    first = {loader: epoch for loader, epoch in sorted(passes, reverse=True)}
    for (loader, epoch), one in sorted(passes.items()):
        name = f"pass {epoch}" + (f" of loader {loader}" if len(last) > 1 else "")
        may_lack = epoch == last[loader] or (partial and epoch == first[loader])
        _judge(name, one, may_lack, problems, notes)
    return Count(problems, notes, unknown)


def _add(
    one: Pass, total: int, ranges: list[list[int]], part: tuple[int, int], worker: int, line: dict[str, Any]
) -> None:
    one.total = max(one.total, total)
    exchange = line.get("n", 0)
    left_out = worker < len(line.get("work", [])) and line["work"][worker][1] == 0
    for begin, end in ranges:
        if part[1] > 1:
            one.parts[begin, end, part[1]].append((part[0], worker, exchange))
        else:
            one.given.append((begin, end, worker, exchange))
        if left_out:
            one.refused += end - begin


def _judge(name: str, one: Pass, may_lack: bool, problems: list[str], notes: list[str]) -> None:
    whole = [*one.given, *(_whole(*item, name, problems) for item in one.parts.items())]
    twice, covered, end = list[str](), 0, 0
    before = (0, 0)
    for begin, stop, worker, exchange in sorted(whole):
        if begin < end:
            places = _places(begin, min(end, stop))
            twice.append(
                f"{name}: {places} came twice, in exchange {before[1]} by worker {before[0]} and in exchange "
                f"{exchange} by worker {worker}"
            )
        covered += max(0, stop - max(begin, end))
        if stop > end:
            end, before = stop, (worker, exchange)
    problems += twice[:MOST_TOLD]
    if len(twice) > MOST_TOLD:
        problems.append(f"{name}: {len(twice) - MOST_TOLD} more ranges came twice")
    total = one.total if one.total >= 0 else end
    lacking = total - covered
    if end > total:
        problems.append(f"{name}: {_places(total, end)} came, and the pass has {_amount(total)}")
    if lacking and not may_lack:
        problems.append(
            f"{name}: {_amount(lacking)} of {_amount(total)} never came, though a later pass began (a program that "
            "leaves its passes early does that)"
        )
    length = f"of {_amount(total)}" if one.total >= 0 else "of a pass whose length is not known"
    if not twice and not (lacking and not may_lack):
        left_out = f"; {_amount(one.refused)} of them in contributions that were left out" if one.refused else ""
        notes.append(f"{name}: {_amount(covered)} {length}, each exactly once{left_out}")


def _whole(
    batch: tuple[int, int, int], came: list[tuple[int, int, int]], name: str, problems: list[str]
) -> tuple[int, int, int, int]:
    """A batch that workers shared: every part once. The last parts may be empty, and did not come then."""
    begin, end, parts = batch
    numbers = sorted(part for part, _, _ in came)
    if numbers != list(range(len(numbers))):
        problems.append(f"{name}: of {_places(begin, end)}, cut into {parts} parts, came the parts {numbers}")
    return begin, end, came[0][1], came[0][2]


def _places(begin: int, end: int) -> str:
    if begin % SHARD == 0 and end - begin >= SHARD:
        return f"shards {begin // SHARD} to {end // SHARD - 1}"
    return f"place {begin}" if end == begin + 1 else f"places {begin} to {end - 1}"


def _amount(places: int) -> str:
    if places >= SHARD:
        return f"{places // SHARD:,} shards"
    return f"{places:,} place{'' if places == 1 else 's'}"
