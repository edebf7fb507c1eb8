# SPDX-License-Identifier: Apache-2.0
"""Makes a block of a run again, with virtual workers, and compares its receipts with those of the run."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import store_for
from paceline.cli.console import refuse
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.spawn import Command
from paceline.cli.run import failure, start
from paceline.cli.run.options import ProgramOptions
from paceline.cli.run.program import Program, starter
from paceline.errors import PacelineError
from paceline.rules.recipes import rule_from_text
from paceline_plugins.receipts.audit import Findings, find
from paceline_plugins.receipts.chain import Chain
from paceline_plugins.receipts.observer import LINES, SEEDS, recomputable
from paceline_plugins.receipts.sealing import FOLDER


@dataclass(frozen=True)
class Again:
    """What is made again."""

    block: int  # number of the exchange
    program: Program  # the training program
    checkpoint: str | None  # where the steps are; None for where the run says, "" to begin at the beginning


def make_again(asked: Again, recorded: list[Chain], findings: Findings) -> None:
    """Make the exchanges from the last state before the block again, and add to `findings` what comes of it."""
    first = recorded[0].start
    if len(recorded) < first["size"]:
        return  # said already
    step = _step_before(asked, recorded[0])
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as place:
        said = _run(asked, recorded, step, Path(place))
        again = [one for one in find(Path(place) / "log" / FOLDER) if one.lines and not one.problems]
        if len(again) < len(recorded):
            findings.open.append(f"the program could not be run again: {said}")
            return
        _compare(asked.block, recorded, again, step, said, findings)


def _why_not(text: str, workers: int) -> str:
    try:
        return recomputable(rule_from_text(text), workers)
    except PacelineError:
        return ""  # a rule that the program builds itself


def _step_before(asked: Again, root: Chain) -> str | None:
    """The newest checkpoint step from which the block follows; None to begin at the beginning."""
    place = asked.checkpoint if asked.checkpoint is not None else root.start["checkpoint"]
    if not place:
        return None
    before = [line["steps"] for n, line in root.merges.items() if n < asked.block]
    try:
        store = store_for(place)
        numbers = [number for number in store.numbers() if number <= max(before, default=0)]
        store.close()
    except (PacelineError, OSError) as error:
        refuse(f"--block: the checkpoints in {place} cannot be read: {error}; --checkpoint PLACE names others")
    return f"{place.rstrip('/')}/step-{max(numbers):09d}" if numbers else None


def _run(asked: Again, recorded: list[Chain], step: str | None, place: Path) -> str:
    """Run the program up to the block, on as many virtual workers; what went wrong, in words."""
    start_line = recorded[0].start
    size, hosts = start_line["size"], len({one.start.get("host") for one in recorded})
    lines = _recorded(start_line).get(LINES)
    if lines not in ("zero", "random-data"):  # as with receipts of earlier versions, which do not say
        lines = "zero" if starter().serves(asked.program, ProgramOptions(), size) else "as-is"
    output, log = place / "output", place / "log"
    output.mkdir()
    log.mkdir()
    one = LaunchCluster(1)
    rule = start_line["settings"]["rule"]
    added = start.environment(one, None if rule.startswith("custom(") else rule, log)
    added |= {
        "PACELINE_RECEIPTS": str(log / FOLDER),
        "PACELINE_RECEIPTS_UNTIL": str(asked.block),
        "PACELINE_RECEIPTS_AUTHORITY": "",
        "PACELINE_RESUME": step or "",
        **_environment(start_line),
    }
    typed = [str(size), str(hosts if size % hosts == 0 else 1), str(output), lines, *asked.program.typed]
    command = Command([sys.executable, "-u", "-m", "paceline.forecast.sim.program", *typed], added, output)
    outcome = start.follow(one, command, lambda rank, line, error: None)
    if outcome.codes:
        words, _ = failure.error_lines(output / "rank-000.err", 0)
        return words or failure.exit_text(outcome.codes[0])
    return str(outcome.error or "it ended, and wrote no receipts")


def _environment(line: dict[str, Any]) -> dict[str, str]:
    """Variables of the run from its first receipt; a file of unknown origin sets nothing but numbers."""
    said = _recorded(line)
    said["OMP_NUM_THREADS"] = str(line["machine"].get("threads"))
    return {name: said[name] for name in (*SEEDS, "OMP_NUM_THREADS") if re.fullmatch(r"\d{1,20}", str(said.get(name)))}


def _recorded(line: dict[str, Any]) -> dict[str, Any]:
    found = line["settings"].get("environment")
    return dict(found) if isinstance(found, dict) else {}


def _compare(
    block: int, recorded: list[Chain], again: list[Chain], step: str | None, said: str, findings: Findings
) -> None:
    numbers = [n for n in compared(again) if n <= block]
    begins = again[0].begins_at
    source = f"checkpoint {Path(step).name}" if step and begins else "the beginning"
    if again[0].models_begun != {k: recorded[0].models_at(begins).get(k) for k in again[0].models_begun}:
        _other_start(begins, source, findings)
        return
    found = first_difference(recorded, again, block)
    doubts = other_machine(recorded, again)
    if why := _why_not(recorded[0].start["settings"]["rule"], len(recorded)):
        doubts.insert(0, why)
    if found is None and block not in numbers:
        last = numbers[-1] if numbers else begins
        findings.open.append(f"the program ended after exchange {last}, before exchange {block}: {said}")
    elif found is None:
        findings.shown.append(f"exchanges {numbers[0]} to {block}, made again from {source}: the same bits")
    elif doubts:
        findings.open.append(
            f"exchange {found[0]} came out otherwise here, which need not mean anything, since sums may be rounded "
            f"otherwise ({'; '.join(doubts)})"
        )
    else:
        findings.problems.append(f"exchange {found[0]}, made again from {source}: {found[1]}")


def _other_start(begins: int, source: str, findings: Findings) -> None:
    if begins:
        findings.problems.append(
            f"{source} does not hold the state after exchange {begins} that the receipts have: it was altered, or is "
            "of another run"
        )
    else:
        findings.open.append(
            "the program begins with another model than the run did: it draws its parameters without a fixed seed, or "
            "is another program or another call. Blocks after a checkpoint can be made again from there: attach(.., "
            "checkpoint=DIR), with run.resume() before the loop"
        )


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
