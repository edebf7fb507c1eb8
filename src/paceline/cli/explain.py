# SPDX-License-Identifier: Apache-2.0
"""`paceline explain`: what a rule does, with the numbers it will use, before anything runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.cli.console import out, refuse
from paceline.cli.explain_text import choices, numbers, sent
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.rules.rule import Rule

UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def command(
    rule: Annotated[
        str | None,
        typer.Argument(help='A recipe such as bmuf, or a rule such as "bmuf(period=8)".'),
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


def parse_count(text: str) -> int:
    """`25M` is 25,000,000."""
    match = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kmbgt]?)\s*", text.lower())
    count = round(float(re.sub("[_,]", "", match[1])) * UNITS[match[2]]) if match else 0
    if count < 1:
        refuse(f"--parameters must be a number such as 250000, 25M or 1.3B, got {text!r}")
    return count


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
    from paceline.rules.recipes import RECIPES, rule_from_text

    rule = rule_from_text(text)
    recipe = RECIPES[rule.name]
    console.print(Text(rule.text(), style="bold"))
    console.print(Text(recipe.summary))
    _section(console, "five choices", _choices(rule, workers))
    _section(console, "equation", Text(recipe.equation))
    _section(
        console,
        f"numbers with {workers} worker{'s' if workers > 1 else ''}",
        _numbers(rule, workers),
    )
    _section(console, "bytes", Text("\n".join(sent(rule, workers, parameters))))
    _section(console, "when to take it", Text(recipe.when))
    _section(console, "source", Text(recipe.source))


def _section(console: Console, title: str, content: Table | Text) -> None:
    console.print(Text(f"\n{title}", style="cyan"))
    if isinstance(content, Text):  # lines of an equation are not broken, however narrow the screen
        for line in content.split():
            console.print(Text("  ") + line, soft_wrap=True)
    else:
        console.print(Padding(content, (0, 0, 0, 2), expand=False))


def _choices(rule: Rule, workers: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, question, answer in choices(rule, workers):
        table.add_row(Text(name), Text(question, style="dim"), Text(answer))
    return table


def _numbers(rule: Rule, workers: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in numbers(rule, workers):
        table.add_row(Text(name), Text(value))
    return table
