# SPDX-License-Identifier: Apache-2.0
"""What the launcher of an elastic run says: while it runs, and at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from paceline.cli.console import err, error_panel
from paceline.cli.launch.supervisor import EXPELLED, MOST, Death
from paceline.cli.run import failure
from paceline.cli.run.elastic_launcher import Ending, came_too_late
from paceline.observe.reports.elastic_events import ElasticStatus, event_text, is_news
from paceline.observe.reports.summary import seconds_text

SAID = ("lost", "paused", "resumed", "stuck", "ended", "refused", "stranger", "record", "launcher record")
"""Events of the control plane that people are told of at once."""
ONCE = ("record", "launcher record")
"""Of these, of the first alone."""
NAMED = 10
"""Workers that were lost and replaced, named one by one."""


def how_text(code: int) -> str:
    """How a worker ended."""
    return "given up by the control plane" if code == EXPELLED else failure.how_text(code)


def of_process(kind: str, facts: Mapping[str, Any], over: bool) -> str:
    """A line about a worker of this host; "" where there is nothing to say."""
    if kind != "process ended" or facts["code"] == 0:
        return ""
    then = "a fresh one takes its place"
    if facts["given_up"]:
        then = f"{MOST} in a row died here before an exchange of theirs counted, so no more are started"
    elif over:
        then = "the program is over, so nobody takes its place"
    return f"this worker is gone: {how_text(facts['code'])}; {then}"


def of_control(kind: str, facts: Mapping[str, Any], elastic_status: ElasticStatus) -> str:
    """A line about the run as a whole, which stands as it does; "" where there is nothing to say."""
    return event_text(kind, facts) if kind in SAID and is_news(kind, facts, elastic_status) else ""


def conclude(ending: Ending, workers: int, seconds: float, quiet: bool) -> int:
    """Say how it ended; the exit code."""
    if ending.stopped_by is not None:
        err().print(f"stopped by {failure.signal_name(ending.stopped_by)}: no worker is left")
        return 128 + ending.stopped_by
    late = [death for death in ending.deaths if death.late and not came_too_late(death)]
    if not ending.well:
        return _failed(ending)
    _name_replaced([death for death in ending.deaths if not death.late])
    if late or ending.left_behind:
        return _incomplete(late, ending)
    if not quiet:
        here = f"{ending.finished} worker{'s' if ending.finished != 1 else ''} finished" if workers else "the run ended"
        err().print(f"{here} after {seconds_text(seconds)}")
    return 0


def _name_replaced(deaths: list[Death]) -> None:
    if not deaths:
        return
    shown = ", ".join(f"[{death.place}] {how_text(death.code)}" for death in deaths[:NAMED])
    more = f", and {len(deaths) - NAMED} more" if len(deaths) > NAMED else ""
    err().print(f"lost on the way: {shown}{more}", markup=False, soft_wrap=True)


def _incomplete(late: list[Death], ending: Ending) -> int:
    """The training is done, but somebody did not come to the end of the program."""
    code = failure.LOST
    for death in late:
        err().print(_panel(death, "failed after others had ended well"))
        if death.code > 0 and death.code != EXPELLED:
            code = death.code
    if ending.left_behind:
        names = ", ".join(f"[{place}]" for place in ending.left_behind)
        err().print(f"stopped, since they did not end within the timeout after the first: {names}", markup=False)
    return code


def _failed(ending: Ending) -> int:
    if ending.gone or ending.why:
        says = ending.why or f"the control plane at {ending.gone} cannot be reached any more"
        hint = "the launcher over there says more" if ending.gone else "its members and their ends are in control.jsonl"
        err().print(error_panel("the run ended", Text(says, style="bold red"), Text(hint, style="default")))
    if not ending.deaths:
        return 1
    last = {death.place: death for death in ending.deaths}  # the last one of each place
    files = {place: death.stderr for place, death in last.items()}
    death = last[failure.culprit({place: death.code for place, death in last.items()}, files)]
    err().print(
        _panel(death, "failed" if len(ending.deaths) == 1 else f"failed, the last of {len(ending.deaths)} here")
    )
    return failure.exit_code(death.code)


def _panel(death: Death, verdict: str) -> Any:
    return failure.panel(death.place, death.code, death.stderr, 0, verdict)
