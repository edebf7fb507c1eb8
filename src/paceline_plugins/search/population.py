# SPDX-License-Identifier: Apache-2.0
"""Population based training: ranks the groups of a round, and gives the worst the checkpoints and values of the best.

    k = max(1, G // 4)
    the k worst of G groups, and all that failed, take the checkpoints of the k best of those that did not
    a group that took another's checkpoint gets values near that group's; the others keep theirs

Source: Jaderberg et al. 2017, arXiv 1711.09846: truncation selection, there with the best and the worst fifth. Where
we differ: the l-th worst takes the l-th best, in place of one drawn at random; and new values are drawn from a range
about the winner's, in place of a factor of 0.8 or 1.2.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import RuleError
from paceline.tuning.names import Changes
from paceline_plugins.search.space import Space

Values = dict[str, Any]
FACTOR = "lr_factor"
DRAWS = 20
"""Attempts to draw values that differ from the winner's."""
TOGETHER = ("gain", "outer_momentum", "outer_lr")
"""Any two of these give the third, so a search changes all that it searches together."""


@dataclass(frozen=True)
class PopulationMember:
    """A group in a round."""

    values: Values  # of its settings
    tune: Changes  # arguments of `run.tune` at the start of the round that set them.
    source: int | None = None  # the group whose checkpoint of the round before it starts from; None for a fresh start
    measure: float | None = None  # its result; None before, and if it failed
    failed: str = ""  # why it failed

    def done(self, measure: float | None, failed: str = "") -> PopulationMember:
        """With its result; a measure that is not finite is a failure."""
        if not failed and (measure is None or not math.isfinite(measure)):
            return replace(self, measure=None, failed=f"it came to {measure}")
        return replace(self, measure=None if failed else measure, failed=failed)


def first_round(space: Space, groups: int, seed: int) -> list[PopulationMember]:
    """Values for a fresh start: one from each of G equal parts of every range, each range in its own random order."""
    if groups < 2:
        raise RuleError(f"a search needs at least 2 groups, got {groups}")
    generator = random.Random(f"paceline search {seed}")
    drawn: list[Values] = [{} for _ in range(groups)]
    for name, values in space.items():
        parts = generator.sample(range(groups), groups)
        for group, part in enumerate(parts):
            drawn[group][name] = values.at((part + generator.random()) / groups)
    return [PopulationMember(values, dict(values)) for values in drawn]


def ranking(members: Sequence[PopulationMember], maximize: bool) -> list[int]:
    """Groups, the best first, failed ones last; a stable sort."""

    def key(group: int) -> tuple[bool, float]:
        measure = members[group].measure
        return measure is None, 0.0 if measure is None else -measure if maximize else measure

    return sorted(range(len(members)), key=key)


def copies(members: Sequence[PopulationMember], maximize: bool) -> dict[int, int]:
    """loser -> the winner whose checkpoint it takes; empty if all groups failed."""
    order = ranking(members, maximize)
    healthy = [group for group in order if members[group].measure is not None]
    count = max(1, len(members) // 4)
    winners = healthy[:count]
    losers = [group for group in reversed(order) if group not in winners]
    losers = [group for number, group in enumerate(losers) if number < count or group not in healthy]
    return {loser: winners[number % len(winners)] for number, loser in enumerate(losers)} if winners else {}


def next_round(
    members: Sequence[PopulationMember], maximize: bool, propose: Callable[[Values], Values]
) -> list[PopulationMember]:
    """The next round; `propose` returns values near a winner's."""
    taken = copies(members, maximize)
    if not taken:
        raise RuleError("all groups failed, so there is no checkpoint to copy")
    found = []
    for group, member in enumerate(members):
        if group not in taken:
            found.append(PopulationMember(member.values, {}, source=group))
            continue
        winner = members[taken[group]].values
        values = propose(winner)
        found.append(PopulationMember(values, changes(winner, values), source=taken[group]))
    return found


def drawn_near(space: Space, winner: Values, generator: random.Random) -> Values:
    """Other values, each drawn from the range around the winner's."""
    values = winner
    for _ in range(DRAWS):
        values = {name: own.near(winner[name]).at(generator.random()) for name, own in space.items()}
        if values != winner:
            break
    return values


def changes(before: Values, after: Values) -> Changes:
    """The arguments of `run.tune` that change the values `before` to `after`.

    Rates change by a factor, because a scheduler may have changed them since they were set.
    """
    asked: Changes = {}
    for name, value in after.items():
        old = before[name]
        base, at, group = name.partition("@")
        moved = any(after[one] != before[one] for one in TOGETHER if one in after)
        if not (moved if name in TOGETHER else value != old):
            continue
        if base in ("lr", FACTOR) and old and value:
            asked[f"{FACTOR}{at}{group}"] = value / old
        else:
            asked[name] = value
    return asked
