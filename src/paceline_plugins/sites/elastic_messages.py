# SPDX-License-Identifier: Apache-2.0
"""The messages of an elastic run's launcher, during the run and at its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from paceline.cli.console import err, error_panel
from paceline.cli.launch.messages import Messages
from paceline.cli.run import failure
from paceline.cli.run.conclusion import finished, stopped
from paceline.errors import LEFT
from paceline.observe.reports.elastic_events import ElasticStatus, event_text, is_news
from paceline_plugins.sites.elastic_launcher import Ending, arrived_after_end, was_revoked
from paceline_plugins.sites.supervisor import EXPELLED, MAX_DEATHS, Death

_RECORD = ("record", "launcher record")
SHOWN = (
    "lost",
    "left early",
    "leaving",
    "paused",
    "resumed",
    "grown",
    "stuck",
    "ended",
    "revoked",
    "refused",
    "stranger",
    *_RECORD,
)
"""Events of the control plane that are printed at once."""
ONCE = ("record", "launcher record")
"""Of these, printed once."""
NAMED = 10
"""Replaced workers that are listed at most."""


def exit_text(code: int) -> str:
    """How a worker ended."""
    return "declared lost by the control plane" if code == EXPELLED else failure.exit_text(code)


def of_process(kind: str, facts: Mapping[str, Any], over: bool) -> str:
    """A line about a worker of this host; "" for unimportant events."""
    if kind != "process ended" or facts["code"] == 0:
        return ""
    if facts.get("left") and facts["code"] == LEFT:
        return "this worker has left in order"
    if facts.get("left"):  # before it held the model, or a program that does not listen to the signal
        return "this worker ended when it was asked to leave; what it had not exchanged goes to another one"
    then = "a new one replaces it"
    if facts.get("hopeless"):
        then = "its certificate was revoked, so no more are started here"
    elif facts["given_up"]:
        then = f"{MAX_DEATHS} in a row died here without a committed exchange, so no more are started"
    elif over:
        then = "the program is over, so it is not replaced"
    return f"this worker is lost: {exit_text(facts['code'])}; {then}"


def of_control(kind: str, facts: Mapping[str, Any], elastic_status: ElasticStatus) -> str:
    """A line about the whole run; "" for unimportant events."""
    return event_text(kind, facts) if kind in SHOWN and is_news(kind, facts, elastic_status) else ""


def conclude(ending: Ending, workers: int, directory: Path, quiet: bool, messages: Messages) -> int:
    """Print how the run ended; the exit code."""
    if ending.stopped_by is not None:
        return stopped(ending.stopped_by)
    late = [one for one in ending.deaths if one.late and not (arrived_after_end(one) or was_revoked(one))]
    if not ending.well and ending.left:
        return _left(ending, quiet)
    if not ending.well:
        return _failed(ending)
    _name_replaced([death for death in ending.deaths if not death.late])
    if late or ending.unfinished:
        return _incomplete(late, ending)
    if workers:
        return finished(directory, quiet, ending.finished, messages)
    if not quiet:
        err().print("the run ended")
    return 0


def _left(ending: Ending, quiet: bool) -> int:
    """Report that the workers of this host left before the end; the exit code."""
    _name_replaced(ending.deaths)
    if not quiet:
        err().print(f"the workers of this host have left the run in order: {ending.left}", markup=False, soft_wrap=True)
    return LEFT


def _name_replaced(deaths: list[Death]) -> None:
    if not deaths:
        return
    shown = ", ".join(f"[{death.place}] {exit_text(death.code)}" for death in deaths[:NAMED])
    more = f", and {len(deaths) - NAMED} more" if len(deaths) > NAMED else ""
    err().print(f"lost during the run: {shown}{more}", markup=False, soft_wrap=True)


def _incomplete(late: list[Death], ending: Ending) -> int:
    """Report workers that did not end after the training was complete."""
    code = failure.LOST
    for death in late:
        err().print(_panel(death, "failed after other workers had succeeded"))
        if death.code > 0 and death.code != EXPELLED:
            code = death.code
    if ending.unfinished:
        names = ", ".join(f"[{place}]" for place in ending.unfinished)
        err().print(f"stopped, since they did not end within the timeout after the first: {names}", markup=False)
    return code


def _failed(ending: Ending) -> int:
    if ending.gone or ending.why:
        reason = ending.why or f"the control plane at {ending.gone} cannot be reached any more"
        hint = "see the output of its launcher" if ending.gone else "control.jsonl has its members and their ends"
        err().print(error_panel("the run ended", Text(reason, style="bold red"), Text(hint, style="default")))
    if not ending.deaths:
        return 1
    last = {death.place: death for death in ending.deaths}
    files = {place: death.stderr for place, death in last.items()}
    death = last[failure.culprit({place: death.code for place, death in last.items()}, files)]
    err().print(
        _panel(death, "failed" if len(ending.deaths) == 1 else f"failed, the last of {len(ending.deaths)} here")
    )
    return failure.exit_code(death.code)


def _panel(death: Death, verdict: str) -> Any:
    return failure.panel(death.place, death.code, death.stderr, 0, verdict)
