# SPDX-License-Identifier: Apache-2.0
"""`paceline explain`: what a rule does, and with which numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.cli.console import out, parse_count, refuse
from paceline.errors import PacelineError
from paceline.observe.reports.summary import bytes_text

if TYPE_CHECKING:
    from paceline.rules.rule import Rule


def command(
    rule: Annotated[
        str | None, typer.Argument(help='A recipe such as bmuf, or a rule such as "bmuf(period=8)".')
    ] = None,
    workers: Annotated[int, typer.Option(help="N, the number of workers.")] = 4,
    parameters: Annotated[str, typer.Option(help="Size of the model: 250000, 25M, 1.3B.")] = "25M",
) -> None:
    """Explain a rule: its five choices, its equation, its numbers at N workers, its bytes."""
    if workers < 1:
        refuse(f"--workers must be at least 1, got {workers}")
    count = parse_count(parameters)
    try:
        if rule is None:
            _print_recipes(out())
        else:
            _print_rule(out(), rule, workers, count)
    except PacelineError as error:
        refuse(str(error))


def _print_recipes(console: Console) -> None:
    from paceline.rules.recipes import RECIPES

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("recipe", no_wrap=True)
    table.add_column("what it does")
    table.add_column("from", style="dim")
    for recipe in RECIPES.values():
        table.add_row(Text(recipe.name, style="bold"), Text(recipe.summary), Text(recipe.source))
    console.print(table)
    console.print("\nmore about one: paceline explain NAME --workers N --parameters 25M")


def _print_rule(console: Console, text: str, workers: int, parameters: int) -> None:
    from paceline.rules.describe import choices
    from paceline.rules.recipes import RECIPES, rule_from_text

    rule = rule_from_text(text)
    recipe = RECIPES[rule.name]
    console.print(Text(rule.text(), style="bold"))
    console.print(Text(recipe.summary))
    _section(console, "five choices", _table(choices(rule, workers)))
    _section(console, "equation", Text(recipe.equation))
    title = f"numbers with {workers} worker{'s' if workers > 1 else ''}"
    _section(console, title, _table(numbers(rule, workers)))
    _section(console, "bytes", Text("\n".join(sent(rule, workers, parameters))))
    _section(console, "when to take it", Text(recipe.when))
    _section(console, "source", Text(recipe.source))


def _section(console: Console, title: str, content: Table | Text) -> None:
    console.print(Text(f"\n{title}", style="cyan"))
    if isinstance(content, Text):  # an equation's lines are never wrapped
        for line in content.split():
            console.print(Text("  ") + line, soft_wrap=True)
    else:
        console.print(Padding(content, (0, 0, 0, 2), expand=False))


def _table(rows: Iterable[Sequence[str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, *middle, value in rows:
        table.add_row(Text(name), *(Text(text, style="dim") for text in middle), Text(value))
    return table


def numbers(rule: Rule, workers: int) -> list[tuple[str, str]]:
    """The rule's numbers, as text."""
    from paceline.rules import describe

    values = describe.numbers(rule, workers).items()
    return [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in values]


def sent(rule: Rule, workers: int, parameters: int) -> list[str]:
    """The formula of the bytes, the bytes of an exchange, and of a minibatch."""
    from paceline.rules import describe
    from paceline.rules.codec import Layout
    from paceline.rules.traffic import bytes_formula, bytes_per_block

    side = math.isqrt(parameters)  # a square matrix and a rest, for codecs that look at rows and columns
    layout = Layout.of([(side, side), (parameters - side * side,)])
    total = bytes_per_block(rule, workers=workers, parameters=layout)
    period = int(describe.numbers(rule, workers).get("period", 1))
    lines = [bytes_formula(rule), f"{bytes_text(total)} from each worker with {parameters:,} parameters"]
    if period > 1:
        lines.append(f"{bytes_text(total / period)} a minibatch, at period {period}")
    return lines
