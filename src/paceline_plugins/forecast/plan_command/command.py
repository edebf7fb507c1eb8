# SPDX-License-Identifier: Apache-2.0
"""`paceline plan`: how fast would this train on that network, under which rule?"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from paceline.cli.console import command_app, err, out, parse_count, refuse, refusing
from paceline.cli.console.program_options import CONTEXT, Arguments, AsJson, ProgramCommand
from paceline.cli.run.checks import look_beside
from paceline.cli.run.program import python_program
from paceline.core.parse import read_call

if TYPE_CHECKING:
    from paceline.rules.rule import Rule
    from paceline_plugins.forecast.plan_command.quality import QualityForecast
    from paceline_plugins.forecast.planner.advice import Advice
    from paceline_plugins.forecast.planner.network import Network
    from paceline_plugins.forecast.planner.table import Rows
    from paceline_plugins.forecast.planner.workload import Workload


GROWING = "where the number of workers grows, the times are those after all of them have joined"
"""Said of rules with `grow`."""
COUNTS = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096"
MOST_COUNTS = 64


def plan(
    script: Annotated[
        Path | None, typer.Argument(help="Training program, of which a few steps are timed.", show_default=False)
    ] = None,
    arguments: Arguments = None,
    network: Annotated[
        str,
        typer.Option(
            help='1gbe, 10gbe, infiniband, nvlink, wan; a measurement such as "link(mbit=500, ms=1, per_host=4)", '
            "which may have racks (per_rack=16, rack_mbit=4000); or a JSON file, such as paceline doctor --json writes."
        ),
    ] = "10gbe",
    step_time: Annotated[float | None, typer.Option(help="Seconds of a minibatch on one worker.")] = None,
    parameters: Annotated[str | None, typer.Option(help="Number of the model's parameters: 25M.")] = None,
    workers: Annotated[str, typer.Option(help="Numbers of workers, separated by commas.")] = COUNTS,
    at: Annotated[int | None, typer.Option(help="The number of workers to recommend for; by default 16.")] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Rule to forecast, also module:name; may be repeated. By default every recipe."),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Log directory of a run: forecast what other numbers of workers make of its samples. Without a "
            "program, the time of a step and the model's size are the run's."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast speed and bytes of every rule at 1 to 4096 workers, and recommend one.

    From the time of a step and the model's size, which it takes from a training program or as numbers. Efficiency is
    speed over N times that of one worker. With --log, the loss is forecast, too, and how many workers pay.
    """
    counts = _counts(workers, at)
    program, own = None, list[str]()
    if script is not None:
        program = python_program(script, arguments, "plan times Python programs with torch")
        own = list(program.arguments)
    from paceline.observe import read_run
    from paceline_plugins.forecast.plan_command.inputs import workload
    from paceline_plugins.forecast.plan_command.quality import (  # here, because torch loads for seconds
        of_time,
        quality_forecast,
        sentence,
    )

    with refusing():
        from paceline.rules.recipes import RECIPES, make_rule
        from paceline_plugins.forecast.planner import forecasts, network_from_text, of_auto, recommend
        from paceline_plugins.forecast.planner.observed import step_s

        run = None if log is None else read_run(log)
        size = None if parameters is None else parse_count(parameters)
        if run is not None and script is None:
            step_time = step_s(run) if step_time is None else step_time
            size = run.parameters if size is None else size

        net, texts = network_from_text(network), rule or list(RECIPES)
        for text in texts:
            look_beside(program, text)
        rules = [_named(make_rule(text, {}), text) for text in texts]
        work = workload(script, own, step_time, size, err())
        rows = forecasts(rules, work, net, counts)
        focus = at or (16 if 16 in counts else counts[-1])
        advice, auto = recommend(work, net, focus), of_auto(work, net, focus)
        quality = None if run is None else quality_forecast(run, counts, partial(of_time, work, net))
        if any(one.schedule.grow is not None for one in rules):
            err().print(GROWING)
        pays = sentence(advice.forecast, quality)
        if as_json:
            more: dict[str, object] = {"quality": quality.as_json()} if quality is not None else {}
            _print_json(rows, advice, work, net, focus, {"auto": auto, "sentence": pays} | more)
        else:
            out().print(Text(auto, style="bold"))
            _print(rows, advice, work, net, focus)
            if quality is not None:
                _print_quality(quality)
            out().print()
            out().print(Text(pays, style="bold"))


def _named(rule: Rule, text: str) -> Rule:
    """A rule of the user's module under the name by which it was asked for, which fits into a table."""
    from paceline.rules.rule import RecipeCall

    module, colon, call = text.strip().partition(":")
    if not colon or rule.name != "custom":
        return rule
    name, settings = read_call(call, "rule", "module:name")
    return replace(rule, name=RecipeCall(f"{module}:{name}", settings))


def _counts(text: str, at: int | None) -> list[int]:
    """The numbers of workers, sorted and without duplicates."""
    try:
        found = {int(word) for word in text.split(",")} | ({at} if at is not None else set())
    except ValueError:
        refuse(f"--workers must be whole numbers separated by commas, such as {COUNTS}, got {text!r}")
    if min(found) < 1 or max(found) > 1 << 16 or len(found) > MOST_COUNTS:
        refuse(f"--workers and --at must lie in 1..65536, {MOST_COUNTS} numbers at most, got {text!r} and {at}")
    return sorted(found)


def _print(rows: Rows, advice: Advice, work: Workload, net: Network, focus: int) -> None:
    from paceline.observe.reports.summary import bytes_text, seconds_text, share_text
    from paceline_plugins.forecast.planner.table import details, efficiencies

    console = out()
    console.print(Text(f"by choice: {advice.rule}", style="bold"))
    console.print(Text(advice.why))
    console.print()
    console.print(
        f"a step takes {seconds_text(work.step_s)} (spread {share_text(work.steps.variation)}), the model has "
        f"{work.layout.numel:,} parameters ({bytes_text(4 * work.layout.numel)})",
        markup=False,
    )
    console.print(net.describe(), markup=False)
    console.print()
    console.print(efficiencies(rows, console.width))
    console.print()
    console.print(details(rows, focus))


def _print_quality(quality: QualityForecast) -> None:
    """What other numbers of workers make of a run's samples."""
    console = out()
    console.print()
    console.print(Text(quality.sentence))
    console.print()
    console.print(quality.table())


def _print_json(rows: Rows, advice: Advice, work: Workload, net: Network, focus: int, more: dict[str, object]) -> None:
    from paceline_plugins.forecast.planner.table import as_json

    setting = {
        "network": net.name,
        "step_s": work.step_s,
        "spread": work.steps.variation,
        "parameters": work.layout.numel,
        "moments": work.moments,
        "epoch": work.epoch,
        "workers": focus,
    }
    print(json.dumps(as_json(rows, advice, setting) | more), flush=True)


app = command_app(plan, cls=ProgramCommand, context_settings=CONTEXT)
