# SPDX-License-Identifier: Apache-2.0
"""`paceline tune --search`: population-based search with groups of workers."""

from __future__ import annotations

import functools
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from paceline.cli.console import command_app, refuse
from paceline.cli.console.program_options import CONTEXT, Arguments, ProgramCommand, Timeout
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import checks
from paceline.cli.run.program import find
from paceline_plugins.search.tune_command import tune

EPILOG = (
    'To search for settings: paceline tune --search "lr=log(1e-4,1e-1)" [OPTIONS] PROGRAM [ARGUMENTS]; '
    "all about it: paceline tune --search --help."
)
SEARCHES = "paceline-searches"


class TuneOrSearch(typer.core.TyperCommand):
    """`tune`; with `--search` or `--again` a second command, which takes a program."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the one command or the other."""
        places = [k for k, one in enumerate(args) if one.partition("=")[0] in ("--search", "--again")]
        if not places:
            given = [two for one, two in pairwise(["", *args]) if "=" in two and two[0] != "-" and one[:2] != "--"]
            if given:
                refuse(f"a setting needs --set in front of it, got {given[0]!r}: --set {given[0]}")
            return super().make_context(info_name, args, parent, **extra)
        asks = args[places[0] : places[0] + 2] == ["--search", "--help"]
        return _searching().make_context(info_name, ["--help"] if asks else args, parent, **extra)


@functools.cache
def _searching() -> Any:
    return typer.main.get_command(command_app(command, cls=ProgramCommand, context_settings=CONTEXT))


def command(
    ctx: typer.Context,
    script: Annotated[Path | None, typer.Argument(help="The training program.", show_default=False)] = None,
    arguments: Arguments = None,
    search: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=RANGE", help="log(a,b), uniform(a,b), int(a,b) or choice(x,y,..); may be repeated."),
    ] = None,
    groups: Annotated[int, typer.Option(help="Number of groups, each with values of its own.")] = 4,
    workers: Annotated[int, typer.Option(help="Workers in each group.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds; after each the worst quarter copies the best quarter.")] = 8,
    blocks: Annotated[int, typer.Option(help="Exchanges of each group in a round, at the longest period.")] = 50,
    measure: Annotated[str, typer.Option(help="Logged value that ranks the groups.")] = "loss",
    maximize: Annotated[bool, typer.Option("--maximize", help="Larger values are better.")] = False,
    together: Annotated[int, typer.Option(help="Groups that train at the same time.")] = 1,
    rule: Annotated[str | None, typer.Option(help="Rule, for programs that name none.")] = None,
    log: Annotated[
        Path | None, typer.Option(help=f"Directory of the search; by default a new one in ./{SEARCHES}.")
    ] = None,
    timeout: Timeout = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of the values that are tried.")] = 0,
    again: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Continue the stopped search in that directory.")
    ] = None,
) -> None:
    """Search for settings of a training program.

    Groups of workers train with values of their own. After each round the worst quarter of them copies the checkpoints
    of the best quarter, and goes on with values near theirs. The program stays as it is; it has to call run.resume()
    before its training loop, and run.log(loss=...) within it.
    """
    # here, because torch loads for seconds and --help must not wait
    from paceline_plugins.search.command_search_rounds import Search, SearchPlan, check

    if again is not None:
        checks.refuse_other_options(ctx, "again")
        raise typer.Exit(Search.load(checks.existing_directory(again)).run())
    if script is None:
        refuse('no program was given: paceline tune --search "lr=log(1e-4,1e-1)" [OPTIONS] PROGRAM [ARGUMENTS]')
    for name, value, least in (
        ("groups", groups, 2),
        ("rounds", rounds, 1),
        ("blocks", blocks, 1),
        ("together", together, 1),
    ):
        if value < least:
            refuse(f"--{name} must be at least {least}, got {value}")
    checks.cluster(workers, 1, 0, None, timeout)
    program = find(script, arguments)
    plan = SearchPlan(
        program=[str(Path(program.words[0]).resolve()), *program.arguments],
        search=search or [],
        groups=groups,
        workers=workers,
        rounds=rounds,
        blocks=blocks,
        measure=measure,
        maximize=maximize,
        together=together,
        rule=rule,
        timeout_s=timeout,
        seed=seed,
    )
    check(plan)
    checks.check_rule(rule, program=program)
    raise typer.Exit(Search(_directory(log, LaunchCluster(workers)), plan, []).run())


def _directory(asked: Path | None, cluster: LaunchCluster) -> Path:
    """A new directory for the search."""
    if asked is not None and asked.is_dir() and any(asked.iterdir()):
        refuse(f"--log {asked} is not empty; give another directory, or continue with paceline tune --again {asked}")
    return checks.log_directory(asked or checks.new_directory(SEARCHES), cluster, False)


app = command_app(tune, cls=TuneOrSearch, epilog=EPILOG)
