# SPDX-License-Identifier: Apache-2.0
"""Questions to a flight tape: the run without a death, on another network, under another rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from devtools.storm.elastic import Outcome, StormSettings
from devtools.storm.flight import TapeStorm
from devtools.storm.tape import Played, Tape, without

from paceline.errors import MismatchError, PacelineError
from paceline.flow.membership import check_rule
from paceline.rules.codec.layout import Layout
from paceline.rules.recipes import rule_from_text


@dataclass(frozen=True)
class Changes:
    """What is asked.

    Attributes:
        alive: workers that are not lost.
        mbit: of each worker's link, Mbit/s; None: as it was.
        rule: "": as it was.
    """

    alive: tuple[int, ...] = ()
    mbit: float | None = None
    rule: str = ""

    def __bool__(self) -> bool:
        return bool(self.alive or self.mbit is not None or self.rule)

    @property
    def options(self) -> str:
        """As options of the command."""
        said = [f"--without-death {worker}" for worker in self.alive]
        said += [f"--mbit {self.mbit:g}"] if self.mbit is not None else []
        return "".join(f" {one}" for one in [*said, *([f"--rule '{self.rule}'"] if self.rule else [])])


def changed(tape: Tape, changes: Changes) -> Played:
    """The tape with these changes.

    An exchange takes the bytes that it has sent over the rate of the link; under another rule the bytes change as those
    of the codecs do for the model's parameters, and a block has the rule's period. How well it trains is not asked.

    Raises:
        MismatchError: the tape does not say what this needs.
        PacelineError: the rule cannot serve.
    """
    if not changes:
        return Played(tape)
    block, ratio = None, 1.0
    if changes.rule:
        rule = rule_from_text(changes.rule)
        check_rule(rule)
        block = rule.schedule.period
        ratio = _bytes(tape, changes.rule) / max(1, _bytes(tape, tape.rule))
    wire_s = tape.wire_s * ratio
    if changes.mbit is not None:
        if not tape.sent:
            raise MismatchError("--mbit needs the bytes of an exchange, and this tape has no exchange of two workers")
        wire_s = 8e-6 * tape.sent * ratio / changes.mbit
    return Played(without(tape, changes.alive), False, block, wire_s)


def _bytes(tape: Tape, text: str) -> int:
    """That the codec of a rule sends for the model, in the middle of a long ring."""
    try:
        return rule_from_text(text).codec.bytes_sent(Layout.vector(tape.numbers), 2, 0)
    except PacelineError as error:
        raise MismatchError(f"--rule needs the rule of the run, and this tape says {text!r:.80}: {error}") from None


@dataclass(frozen=True)
class Replay:
    """How a tape came out.

    Attributes:
        outcome: as of any seed.
        seconds: until the last exchange.
        lost, repeated: minibatches.
        deaths: of workers.
        same: whether the members, generation by generation, were those of the tape.
    """

    outcome: Outcome
    seconds: float
    lost: int
    repeated: int
    deaths: int
    same: bool


def replay(seed: int, played: Played) -> Replay:
    """Play it once."""
    storm = TapeStorm(seed, StormSettings("tape", played=played))
    outcome = storm.run()
    same = storm.generations == storm.recorded.generations
    return Replay(outcome, storm.ended_s, storm.lost, storm.repeated, storm.deaths, same)


def rows(tape: Tape, replays: Sequence[Replay]) -> list[tuple[str, ...]]:
    """A table: the tape, and each replay in a column."""
    began, deaths = tape.flights[0].joined_s, sum(one.end == "lost" for one in tape.flights)
    times = [tape.commits.get(tape.exchanges, began), *(one.seconds for one in replays)]
    return [
        ("seconds from the first worker to the last exchange", *(f"{one - began:.1f}" for one in times)),
        ("exchanges", str(tape.exchanges), *(str(one.outcome.exchanges) for one in replays)),
        ("workers lost", str(deaths), *(str(one.deaths) for one in replays)),
        ("minibatches lost", "", *(str(one.lost) for one in replays)),
        ("minibatches repeated", "", *(str(one.repeated) for one in replays)),
        ("members as recorded", "", *("yes" if one.same else "no" for one in replays)),
    ]
