# SPDX-License-Identifier: Apache-2.0
"""The check of a run's receipts, from the files alone: chains, seals, equal models, and places exactly once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline_plugins.receipts import chain as chains
from paceline_plugins.receipts import seal as seals
from paceline_plugins.receipts.chain import Chain

SHARD = 1 << 40
"""Places of a shard of unknown length (:mod:`paceline.data.sampling.position`)."""
MOST_TOLD = 3
"""Double places that are named."""


@dataclass
class Pass:
    """What the receipts say of one pass over the data of a loader."""

    total: int = -1  # its places; -1 if its length is not known
    given: list[tuple[int, int, int, int]] = field(default_factory=list)  # (begin, end, worker, exchange), as they came
    # (begin, end, of n) -> (part, worker, exchange), of batches that several workers shared
    parts: dict[tuple[int, int, int], list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    refused: int = 0  # places in contributions that were left out of the mean


@dataclass(frozen=True)
class Count:
    """The result of a count."""

    problems: list[str]  # places that came twice, or never in a pass that is over
    notes: list[str]  # what each pass has, in words
    unknown: int  # batches whose places are not known


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


LOG_BEGINS = b'{"kind": "'
"""How the lines of event logs begin; those of a chain have no spaces, and their keys in order."""
SHOWN = 16
"""Digits of a fingerprint or a digest in messages."""


@dataclass
class Findings:
    """What a check found."""

    problems: list[str] = field(default_factory=list)  # what is wrong, in sentences
    open: list[str] = field(default_factory=list)  # what cannot be told, in sentences
    shown: list[str] = field(default_factory=list)  # what is shown to be right, in sentences

    @property
    def code(self) -> int:
        """Exit code: 0 all right, 1 something is wrong, 2 something cannot be told."""
        return 1 if self.problems else 2 if self.open else 0


def find(folder: Path) -> list[Chain]:
    """The chains in a folder, in order of rank: each worker's has one name."""
    names = [path.stem.removeprefix("rank-") for path in folder.glob("rank-*.jsonl")]
    ranks = sorted(int(name) for name in names if name.isdecimal())
    paths = {rank: folder / chains.chain_name(rank) for rank in ranks}
    return [chains.read(path, rank) for rank, path in paths.items() if path.is_file()]


def _check_names(folder: Path, found: list[Chain], findings: Findings) -> None:
    """Nothing else passes for a receipt: a program that reads `rank-000.jsonl` must read what was checked."""
    known = {chains.chain_name(one.rank) for one in found}
    for name in sorted(path.name for path in folder.iterdir()):
        number = name.removeprefix("seal-").removesuffix(".json")
        is_seal = number.isdecimal() and name == seals.seal_name(int(number))
        if name.casefold().startswith(("rank", "seal")) and name not in known and not is_seal:
            findings.problems.append(f"{name} is neither a chain nor a seal: a receipt has one name, move this away")


def holds_logs(folder: Path) -> bool:
    """Whether the folder's files of ranks are the event logs of a run, which have the names of chains."""
    for path in folder.glob("rank-*.jsonl"):
        with path.open("rb") as file:
            line = file.readline(len(LOG_BEGINS))
        if line and line != LOG_BEGINS:
            return False
    return True


def audit(folder: Path, found: list[Chain], authority: str | None = None) -> Findings:
    """Check the receipts in a folder.

    Args:
        folder: of the receipts.
        found: its chains.
        authority: fingerprint of the key that must have signed them; None takes the one that they name themselves.
    """
    findings = Findings()
    _check_names(folder, found, findings)
    for one in found:
        findings.problems += one.problems
    _check_seals(folder, found, authority, findings)
    whole = [one for one in found if one.lines]
    if not whole or any(one.problems for one in found):
        return findings
    _check_starts(whole, findings)
    _check_models(whole, findings)
    if findings.problems or len(whole) < whole[0].start["size"]:
        return findings
    counted = count(
        {one.rank: [*one.merges.values(), *(line for line in one.lines if line["kind"] == "end")] for one in whole},
        partial=any(one.foreign for one in whole),
    )
    findings.problems += counted.problems
    findings.shown += counted.notes
    unended = [str(one.rank) for one in whole if one.lines[-1]["kind"] != "end"]
    if unended:
        findings.open.append(
            f"the run did not end in order: the chain of worker {', '.join(unended)} has no end, so this holds up to "
            f"exchange {min(max(one.merges, default=0) for one in whole)}"
        )
    if counted.unknown:
        findings.open.append(
            f"of {counted.unknown} batches no receipt says which samples they held: the program did not take them from "
            "run.share, so nothing shows that each sample came once"
        )
    return findings


def _check_seals(folder: Path, found: list[Chain], authority: str | None, findings: Findings) -> None:
    sealed = set[int]()
    by_rank = {one.rank: one for one in found}
    named = {one.start["authority"] for one in found if one.lines}
    for path in sorted(folder.glob("seal-*.json")):
        try:
            seal = seals.read(path)
        except (ValueError, OSError) as error:
            findings.problems.append(str(error))
            continue
        expected = {authority} if authority is not None else named
        if expected and seal.authority not in expected:
            wanted = " or ".join(one[:SHOWN] or "none" for one in sorted(expected))
            findings.problems.append(
                f"{seal.name} is signed with another key than that of the run's authority: {seal.authority[:SHOWN]}, "
                f"and not {wanted}"
            )
            continue
        for rank, (lines, head) in seal.chains.items():
            sealed.add(rank)
            if rank in by_rank:
                _compare_seal(seal, by_rank[rank], lines, head, findings)
            else:
                findings.open.append(
                    f"{seal.name} covers worker {rank}, and {chains.chain_name(rank)} is not here: copy it from there"
                )
    bare = [str(one.rank) for one in found if one.rank not in sealed]
    if bare:
        findings.open.append(
            f"no seal covers the chain of worker {', '.join(bare)}: anyone could have written it, and its last lines "
            "may be missing (paceline run seals chains when its workers have ended)"
        )
    elif found and not findings.problems:
        key = authority if authority is not None else next(iter(named), "")
        findings.shown.append(
            f"{len(found)} chain{'s' if len(found) > 1 else ''}, sealed by the authority {key[:SHOWN]}"
        )


def _compare_seal(seal: seals.Seal, one: Chain, lines: int, head: str, findings: Findings) -> None:
    name = chains.chain_name(one.rank)
    if one.lines and one.start["job"] != seal.job:
        findings.problems.append(
            f"{name} is of job {one.start['job'] or '(none)'}, and {seal.name} of job {seal.job}: it is another run's"
        )
    elif one.count < lines:
        findings.problems.append(f"{name} ends with line {one.count}, and {lines} were sealed: its tail was cut off")
    elif one.count > lines:
        findings.problems.append(f"{name} has {one.count} lines, and {lines} were sealed: lines were added later")
    elif one.head != head:
        findings.problems.append(f"{name}: the chain that was sealed is another one, for its last hash differs")


def _check_starts(found: list[Chain], findings: Findings) -> None:
    first = found[0].start
    for one in found:
        start = one.start
        if start["rank"] != one.rank:
            findings.problems.append(f"{chains.chain_name(one.rank)} is the chain of worker {start['rank']}")
        if one.rank >= start["size"]:
            findings.problems.append(f"{chains.chain_name(one.rank)} is of no worker: the run had {start['size']}")
        for name in ("job", "authority", "size", "settings", "models"):
            if start[name] != first[name]:
                findings.problems.append(
                    f"workers {found[0].rank} and {one.rank} began with different {name}: {_short(first[name])} and "
                    f"{_short(start[name])}"
                )
    missing = sorted(set(range(first["size"])) - {one.rank for one in found})
    if missing:
        findings.open.append(
            f"of {first['size']} workers the chains of {', '.join(map(str, missing))} are not here: copy them from "
            "their hosts"
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_models(found: list[Chain], findings: Findings) -> None:
    """After each exchange all workers must hold the same model; the last lines of a chain may be missing."""
    tables = {one.rank: one.merges for one in found}
    numbers = sorted(set().union(*tables.values()))
    for n in numbers:
        lines = {rank: table[n] for rank, table in tables.items() if n in table}
        for field_name, what in (("model", "model"), ("work", "list of contributions")):
            values = {rank: str(line[field_name]) for rank, line in lines.items()}
            usual = Counter(values.values()).most_common(1)[0][0]
            odd = sorted(rank for rank, value in values.items() if value != usual)
            if odd:
                certain = 2 * len(odd) < len(values)
                who = f"worker {', '.join(map(str, odd))}" if certain else "one half of the workers"
                findings.problems.append(
                    f"after exchange {n} {who} had another {what} than the others: its memory is faulty, or something "
                    "wrote into the model outside of the optimizer's step"
                )
                return
    for one in found:
        _check_resumes(one, findings)
    if numbers:
        findings.shown.append(
            f"{len(numbers)} merges (exchanges {numbers[0]} to {numbers[-1]}); all workers held one model after each"
        )


def _check_resumes(one: Chain, findings: Findings) -> None:
    """A run goes on from the very state that its chain has."""
    models: dict[int, dict[str, str]] = {}  # exchange -> fragment -> digest, of all that came before
    now: dict[str, str] = {}
    for line in one.lines:
        if line["kind"] == "start":
            now = dict(line["models"])
        elif line["kind"] == "merge":
            now[str(line["fragment"])] = line["model"]
            models[line["n"]] = dict(now)
        elif line["kind"] == "resume":
            then = models.get(max((n for n in models if n <= line["n"]), default=-1))
            if then is not None and any(then.get(k, v) != v for k, v in line["models"].items()):
                findings.problems.append(
                    f"worker {one.rank} went on after exchange {line['n']} from another model than it had there: the "
                    "checkpoint was altered"
                )
            now = dict(line["models"])
