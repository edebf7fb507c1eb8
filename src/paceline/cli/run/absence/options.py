# SPDX-License-Identifier: Apache-2.0
"""The options by which the workers of a host leave an elastic run in order, and come back."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import err, refuse
from paceline.cli.run.absence.idle import IdleHost
from paceline.observe.reports.summary import seconds_text

if TYPE_CHECKING:
    from paceline.cli.run.absence.notice import Notice

NoticeOption = Annotated[
    str | None,
    typer.Option(
        "--notice",
        metavar="FILE|URL",
        help="With --elastic or --join: the workers of this host leave in order once this file exists, or this URL has "
        "a notice; aws, gcp or azure ask that cloud whether it takes this machine.",
    ),
]
UntilOption = Annotated[
    str | None,
    typer.Option("--until", metavar="HH:MM", help="The same at this time of day; tomorrow if it is past."),
]
WhileIdleOption = Annotated[
    bool,
    typer.Option("--while-idle", help="Workers of this host take part only while nobody else uses it."),
]


@dataclass(frozen=True)
class AbsenceOptions:
    """When the workers of this host leave.

    Attributes:
        notice: of `--notice`, or None.
        until: of `--until`, or None.
        while_idle: of `--while-idle`.
    """

    notice: str | None = None
    until: str | None = None
    while_idle: bool = False

    def check(self, elastic: bool) -> None:
        """Refuse them in runs of a fixed size, and times of day that are none."""
        given = {"--notice": self.notice, "--until": self.until, "--while-idle": self.while_idle or None}
        names = [name for name, value in given.items() if value is not None]
        if names and not elastic:
            refuse(
                f"{names[0]} is for elastic runs, whose workers may leave while others go on: give --elastic MIN:MAX "
                "or --join HOST:PORT as well, or leave it out"
            )
        if self.until is not None:
            time_of_day(self.until)

    def begin(self, quiet: bool, sessions: Callable[[], Collection[int]] = tuple) -> Absence:
        """Begin to look; prints what the options mean.

        Args:
            quiet: print nothing.
            sessions: gives the process sessions of this host's workers.
        """

        def say(text: str) -> None:
            if not quiet:
                err().print(text, markup=False, soft_wrap=True)

        notice = ends = None
        if self.notice is not None:
            from paceline.cli.run.absence.notice import Notice  # here, because it loads an HTTP client

            notice = Notice(self.notice, say)
            try:
                notice.start()
            except (OSError, ValueError) as error:
                refuse(f"--notice {notice.place} cannot be asked ({error}): give a URL that answers on this host")
        if self.until is not None:
            now = datetime.datetime.now()
            ends = next_time(self.until, now)
            say(f"the workers of this host leave at {ends:%A %H:%M}, in {seconds_text((ends - now).total_seconds())}")
        if self.while_idle:
            say(
                "workers of this host take part while nobody uses it: it looks at terminals and remote logins, at the "
                "desktop where logind answers, and at the processors' use by others"
            )
        return Absence(notice, ends, IdleHost(sessions) if self.while_idle else None)


@dataclass
class Absence:
    """Why the workers of this host are to be absent.

    Attributes:
        notice: that the host will be taken, or None.
        ends: when they leave, local time, or None.
        idle: whether somebody uses the host, or None.
        asked: why they leave for good, said by the launcher itself.
    """

    notice: Notice | None = None
    ends: datetime.datetime | None = None
    idle: IdleHost | None = None
    asked: str = ""

    def for_good(self) -> str:
        """Why they leave and do not come back; "" if they do not."""
        if not self.asked and self.notice is not None:
            self.asked = self.notice.why()
        if not self.asked and self.ends is not None and datetime.datetime.now() >= self.ends:
            self.asked = f"it is {self.ends:%H:%M}"
        return self.asked

    def for_now(self) -> str:
        """Why they are absent at present; "" if they are not."""
        return "" if self.idle is None else self.idle.why()

    def close(self) -> None:
        """Look no more."""
        if self.notice is not None:
            self.notice.close()


def time_of_day(text: str) -> datetime.time:
    """Parse HH:MM."""
    try:
        return datetime.datetime.strptime(text, "%H:%M").time()
    except ValueError:
        refuse(f"--until must be a time of day such as 08:00, got {text!r}")


def next_time(text: str, now: datetime.datetime) -> datetime.datetime:
    """The next time that a clock shows HH:MM."""
    found = datetime.datetime.combine(now.date(), time_of_day(text))
    return found if found > now else found + datetime.timedelta(days=1)
