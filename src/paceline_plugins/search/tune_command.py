# SPDX-License-Identifier: Apache-2.0
"""`paceline tune`: change settings of a running training, through its log directory."""

from __future__ import annotations

import ast
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.console import err, near, out, refuse
from paceline.cli.run.checks import LOGS
from paceline.cli.watch import newest_run
from paceline.errors import PacelineError
from paceline.observe.reports.log import RunLog
from paceline.observe.reports.read import read_run
from paceline.tuning import request_files
from paceline.tuning.names import Changes, flat

POLL_EVERY_S = 0.2
WAIT_S = 60.0
"""For the answer."""
REFUSED = 1


def tune(
    run: Annotated[
        Path, typer.Argument(help="Log directory of the run, or its parent directory: the newest run there.")
    ] = Path(LOGS),
    lr: Annotated[float | None, typer.Option(help="Learning rate, of all parameter groups.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting: period=8, lr_factor=0.5, lr@1=0.1."),
    ] = None,
    revert: Annotated[bool, typer.Option("--revert", help="Undo the last change.")] = False,
) -> None:
    """Change settings of a running training, on all its workers at the same block."""
    if lr is None and not settings and not revert:
        refuse("nothing to change was named: give --lr 0.01, --set NAME=VALUE (such as --set period=8) or --revert")
    changes = _changes({} if lr is None else {"lr": lr}, settings or [], revert)
    directory = newest_run(run)
    if _over(directory):
        err().print(f"the run in {near(directory)} is over: nothing can be tuned", markup=False, soft_wrap=True)
        raise typer.Exit(REFUSED)
    try:
        name = request_files.post(directory, changes, revert)
    except OSError as error:
        refuse(f"cannot write a request into {directory}: {error}; tuning needs write permission there")
    answer = _await(directory, name)
    if answer is None:
        _unanswered(directory, name)
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
        refuse(f"--revert undoes the last change and excludes other changes, got {', '.join(asked)}")
    try:
        return {} if revert else flat(asked)
    except PacelineError as error:
        refuse(str(error))


def _value(text: str) -> Any:
    """A Python literal, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _over(directory: Path) -> bool:
    """Whether all workers that left a log have closed it."""
    try:
        log: RunLog = read_run(directory)
    except (PacelineError, OSError) as error:
        refuse(str(error))
    return all(worker.closed is not None for worker in log.workers)


def _await(directory: Path, name: str) -> dict[str, Any] | None:
    """The answer; None if the time is over, or the run."""
    until = time.monotonic() + WAIT_S
    while (answer := request_files.answer_to(directory, name)) is None and time.monotonic() < until:
        if _over(directory):
            return request_files.answer_to(directory, name)
        time.sleep(POLL_EVERY_S)
    return answer


def _unanswered(directory: Path, name: str) -> None:
    if _over(directory):
        request_files.withdraw(directory, name)
        err().print("the run ended before it received the request")
    elif request_files.is_taken(directory, name):
        err().print(f"received, but no exchange ended within {WAIT_S:g} s: it takes effect after the next one")
    elif request_files.withdraw(directory, name):
        err().print(
            f"no worker read the request within {WAIT_S:g} s, so it is withdrawn: the run is dead, or makes no steps "
            "at present; then ask again"
        )


def applied_text(answer: dict[str, Any]) -> str:
    """The changes, and when they took effect."""
    changes = [f"{name} {show(before)} -> {show(after)}" for name, (before, after) in answer["changes"].items()]
    verb = "undone" if answer.get("revert") else "applied"
    return f"{verb} after block {answer['block']}, minibatch {answer['minibatch']}: {', '.join(changes)}"


def show(value: Any) -> str:
    """A value in short form."""
    if isinstance(value, list):
        return f"({', '.join(show(one) for one in value)})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
