# SPDX-License-Identifier: Apache-2.0
"""Commands that take a program and its arguments: an option of ours after the program is a mistake.

`train.py --workers 4` would pass `--workers 4` to the program and start one worker. It is refused, with the right
order; after `--` a program may have options of the same names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from paceline.cli.console import refuse, without_secrets

CONTEXT: dict[str, Any] = {"allow_interspersed_args": False}  # options after the program are its own

# options of several commands
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[--] ARGS...", help="The program's own arguments.")]
RuleText = Annotated[
    str | None,
    typer.Option(help='Rule such as "bmuf(period=16)", or module:name, for programs that name none (default auto).'),
]
Log = Annotated[Path | None, typer.Option(help="Directory for the logs; by default a new one in ./paceline-logs.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run that the log directory holds.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which a worker that does not answer is lost.")]
Master = Annotated[
    str | None, typer.Option(help="HOST:PORT where the hosts meet: host 0's address and a free port of it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
AsIs = Annotated[
    bool, typer.Option("--as-is", help="Start the program as it is, even if it does not attach paceline itself.")
]
RandomData = Annotated[
    bool,
    typer.Option("--random-data", help="The program makes random samples itself: each worker draws different ones."),
]
ForceZeroLines = Annotated[
    bool, typer.Option("--force-zero-lines", help="Hide the cluster from a program that has cluster code of its own.")
]
Module = Annotated[
    bool, typer.Option("-m", help="The program is a Python module, as with python -m: -m package.module.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Only the workers' output: no status, no summary.")]


def own_arguments(arguments: list[str] | None) -> list[str]:
    """The program's arguments, without a `--` in front."""
    return (arguments or [])[1:] if (arguments or [])[:1] == ["--"] else arguments or []


def with_records(function: Callable[..., None]) -> Callable[..., None]:
    """The function as typer reads it: a parameter that is a dataclass becomes its fields, an option each.

    A field may be a dataclass itself.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters = list[inspect.Parameter]()
    for one in inspect.signature(function).parameters.values():
        fields = _fields(hints[one.name])
        parameters += fields or [one.replace(annotation=hints[one.name])]

    @functools.wraps(function)
    def command(**given: Any) -> None:
        function(**{name: _record(hints[name], given) if _is_record(hints[name]) else given[name] for name in names})

    names = list(inspect.signature(function).parameters)
    command.__signature__ = inspect.Signature(sorted(parameters, key=lambda one: one.kind))  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _fields(record: Any) -> list[inspect.Parameter]:
    """A record's fields as parameters."""
    if not _is_record(record):
        return []
    hints, result = get_type_hints(record, include_extras=True), list[inspect.Parameter]()
    for field in dataclasses.fields(record):
        kind = hints[field.name]
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        one = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        result += _fields(kind) or [one]
    return result


def _record(kind: Any, given: dict[str, Any]) -> Any:
    """A record of the given options."""
    hints = get_type_hints(kind)
    return kind(
        **{
            field.name: _record(hints[field.name], given) if _is_record(hints[field.name]) else given[field.name]
            for field in dataclasses.fields(kind)
        }
    )


class ProgramCommand(typer.core.TyperCommand):
    """A command whose arguments end with a program and its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, then refuse options of this command after the program."""
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            opts = getattr(error.param, "opts", ())
            got = " ".join(value for name, value in pairwise(given) if name in opts)
            if not got:
                raise
            raise typer.BadParameter(f"{error.message}, got {got!r}", ctx, error.param) from error
        own = list(ctx.params.get("arguments") or ())
        before = given[: len(given) - len(own)]
        if own and "--" not in (own[0], before[-2] if len(before) > 1 else ""):
            self._refuse_late_options(ctx, before, own)
        return rest

    def _refuse_late_options(self, ctx: Any, before: Sequence[str], own: Sequence[str]) -> None:
        options = {name: one for one in self.get_params(ctx) for name in one.opts if name.startswith("-")}
        for name in ("--help", "--help-all", "-m"):  # after the program they are the program's own
            options.pop(name, None)
        late, left = split(own, {name: not getattr(one, "is_flag", False) for name, one in options.items()})
        if not late:
            return
        before = [without_secrets(word) for word in before]
        program, names = before[-1], [one.partition("=")[0] for one in late if one.partition("=")[0] in options]
        right = [*ctx.command_path.split(), *before[:-1], *late, program, *left]
        through = [*ctx.command_path.split(), *before, "--", *own]
        wrong = f"{', '.join(names)} after the program {program}, where arguments are its own; say which is meant:"
        refuse(f"{wrong}\n  {shlex.join(right)} (paceline's)\n  {shlex.join(through)} (its own)")


def split(arguments: Sequence[str], takes_value: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Split into options of `takes_value` with their values, and all other arguments; `--` ends the search."""
    late, left, rest = list[str](), list[str](), list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if word == "--":
            return late, [*left, word, *rest]
        if name not in takes_value or (equals and not takes_value[name]):
            left.append(word)
            continue
        late.append(word)
        if takes_value[name] and not equals and rest:
            late.append(rest.pop(0))
    return late, left
