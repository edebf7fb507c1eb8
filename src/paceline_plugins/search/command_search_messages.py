# SPDX-License-Identifier: Apache-2.0
"""The messages of a search: a round's table, and the best group."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.table import Table
from rich.text import Text

from paceline_plugins.search.population import PopulationMember
from paceline_plugins.search.tune_command import show


def table(members: Sequence[PopulationMember], title: str, measure: str, busy: Collection[int]) -> Table:
    """One row a group: its values, its initial checkpoint, its result."""
    found = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("group", *members[0].values, "begins with"):
        found.add_column(name)
    found.add_column(measure, justify="right")
    for group, member in enumerate(members):
        values = [show(value) for value in member.values.values()]
        row = [str(group), *values, _begins(group, member), _result(member, group in busy)]
        found.add_row(*(Text(text) for text in row))
    return found


def _begins(group: int, member: PopulationMember) -> str:
    if member.source is None:
        return "nothing"
    return "its own" if member.source == group else f"group {member.source}'s"


def _result(member: PopulationMember, busy: bool) -> str:
    if member.failed:
        return f"failed: {member.failed}"
    if member.measure is not None:
        return show(float(member.measure))
    return "trains" if busy else "waits"


def best_text(member: PopulationMember, group: int, number: int, measure: str) -> str:
    """The best group and its values."""
    values = ", ".join(f"{name} {show(value)}" for name, value in member.values.items())
    result = "" if member.measure is None else f", {measure} {show(float(member.measure))}"
    return f"best of round {number}: group {group} with {values}{result}"
