# SPDX-License-Identifier: Apache-2.0
"""`paceline tune`: change settings of a run that goes on, through its log directory."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.console import err, near, out, refuse
from paceline.errors import PacelineError
from paceline.observe.reports.log import RunLog
from paceline.observe.reports.read import has_run, read_run
from paceline.tuning import request_files
from paceline.tuning.names import Changes, flat

POLL_EVERY_S = 0.2
REFUSED = 1


def command(
    run: Annotated[Path, typer.Argument(help="Log directory of the run, or the one above it: the newest run there.")],
    lr: Annotated[float | None, typer.Option(help="Learning rate, of all parameter groups.")] = None,
    lr_factor: Annotated[float | None, typer.Option(help="Multiply the rate, whatever schedule sets it.")] = None,
    period: Annotated[int | None, typer.Option(help="Minibatches of a block.")] = None,
    gain: Annotated[str | None, typer.Option(help="Gain of the outer step: auto, paper or a number.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other, such as lr@1=0.1 or betas=(0.9,0.99)."),
    ] = None,
    revert: Annotated[bool, typer.Option("--revert", help="Undo the last change.")] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 30.0,
) -> None:
    """Change settings of a run that goes on, on all its workers at the same block."""
    asked = {"lr": lr, "lr_factor": lr_factor, "period": period, "gain": None if gain is None else _value(gain)}
    changes = _changes({name: value for name, value in asked.items() if value is not None}, settings or [], revert)
    directory = find(run)
    if _over(directory):
        err().print(f"the run in {near(directory)} is over: nothing can be tuned", markup=False, soft_wrap=True)
        raise typer.Exit(REFUSED)
    try:
        name = request_files.post(directory, changes, revert)
    except OSError as error:
        refuse(f"cannot write a request into {directory}: {error}; who may write there may tune")
    answer = _await(directory, name, wait)
    if answer is None:
        _unanswered(directory, name, wait)
    elif answer.get("applied"):
        out().print(applied_text(answer), markup=False, soft_wrap=True)
        return
    else:
        err().print(f"refused: {answer.get('refused')}", markup=False, soft_wrap=True)
    raise typer.Exit(REFUSED)


def _changes(asked: dict[str, Any], settings: list[str], revert: bool) -> Changes:
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            refuse(f"--set needs NAME=VALUE, such as weight_decay=0.01, got {text!r}")
        asked[name.strip()] = _value(value.strip())
    if revert and asked:
        refuse(f"--revert undoes the last change and goes with no other, got {', '.join(asked)}")
    try:
        return {} if revert else flat(asked)
    except PacelineError as error:
        refuse(str(error))


def _value(text: str) -> Any:
    """A literal as Python writes it, never evaluated; a word is a word."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def find(run: Path) -> Path:
    """The log directory that is meant: itself, or the newest below it."""
    if not run.is_dir():
        refuse(f"{run} is no directory; give the log directory of a run")
    if has_run(run):
        return run
    below = [path for path in run.iterdir() if path.is_dir() and has_run(path)]
    if not below:
        refuse(f"no run has its logs in {run} or right below it; no worker may have attached yet")
    return max(below, key=lambda path: max(file.stat().st_mtime for file in path.glob("rank-*.jsonl")))


def _over(directory: Path) -> bool:
    """Whether all workers that left a log have closed it."""
    try:
        log: RunLog = read_run(directory)
    except (PacelineError, OSError) as error:
        refuse(str(error))
    return all(worker.closed is not None for worker in log.workers)


def _await(directory: Path, name: str, wait_s: float) -> dict[str, Any] | None:
    """The answer; None where there is none in time, or nobody is left who would give one."""
    until = time.monotonic() + wait_s
    while (answer := request_files.answer_to(directory, name)) is None and time.monotonic() < until:
        if _over(directory):
            return request_files.answer_to(directory, name)
        time.sleep(POLL_EVERY_S)
    return answer


def _unanswered(directory: Path, name: str, wait_s: float) -> None:
    if _over(directory):
        request_files.withdraw(directory, name)
        err().print("the run came to its end before it took this up")
    elif request_files.is_taken(directory, name):
        err().print(f"taken up, but no exchange was over within {wait_s:g} s: it takes effect after the next one")
    elif request_files.withdraw(directory, name):
        err().print(
            f"no worker looked within {wait_s:g} s, so the request is withdrawn: has the run died, or does it make "
            "no steps at present? A longer --wait may help"
        )


def applied_text(answer: dict[str, Any]) -> str:
    """What has changed, and when."""
    changes = [f"{name} {show(before)} -> {show(after)}" for name, (before, after) in answer["changes"].items()]
    verb = "undone" if answer.get("revert") else "applied"
    return f"{verb} after block {answer['block']}, minibatch {answer['minibatch']}: {', '.join(changes)}"


def show(value: Any) -> str:
    """A value for people."""
    if isinstance(value, list):
        return f"({', '.join(show(one) for one in value)})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
