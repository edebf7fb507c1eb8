# SPDX-License-Identifier: Apache-2.0
"""Changes of settings that take effect on all workers at the same place.

Where workers exchange together, one that has a request says so in the header of its next exchange. When that exchange
is over, and before the next one begins, all gather all requests, tell each other whether they can carry them out, and
apply them in rank order: each request on every worker, or on none.

Where each exchanges by itself (asynchronous rules) there is no such place. There a request goes through the log
directory, which all workers have to see, and each applies it before its next push.

Every change can be taken back, the last one first.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.communication import Transport
from paceline.core.world import World
from paceline.errors import PacelineError, RuleError, UnsupportedError
from paceline.observe.event_log import log_name
from paceline.rules.rule import Rule
from paceline.tuning.names import Changes, flat
from paceline.tuning.period_controller import PeriodController
from paceline.tuning.request import TuneRequest
from paceline.tuning.request_files import RequestFile, RequestFiles
from paceline.tuning.tunables import Tunables

logger = logging.getLogger("paceline")

GatheredRequests = tuple[list[TuneRequest], list[Any], list[Any]]
"""Requests of all workers, for each worker what is against them, and what it has measured."""

KEPT = 100
"""Changes that can be taken back, at most."""


class Tuner:
    """The requests of one worker, and the changes of all.

    Args:
        knobs: what can be changed.
        world: this worker.
        mailbox: where requests from outside come from.
        note: writes into the log.
        each: whether workers exchange each by itself.
    """

    def __init__(
        self,
        tunables: Tunables,
        world: World,
        request_files: RequestFiles,
        note: Callable[..., None],
        each: bool = False,
    ) -> None:
        self.tunables, self._world, self._request_files, self._note, self._each = (
            tunables,
            world,
            request_files,
            note,
            each,
        )
        self.place: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """(blocks that have been exchanged, minibatches of this worker) at present."""
        self.follow: Callable[[Rule], None] = lambda rule: None
        """Told of the rule when it has changed, where no exchange is waited for."""
        self.period_controller: PeriodController | None = None
        """What measures for a period that follows measured times, where the rule has one."""
        self._asked: list[TuneRequest] = []
        self._decided: list[TuneRequest] = []
        self._stack: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)

    @property
    def rule(self) -> Rule:
        """The rule as it is at present."""
        return self.tunables.rule

    # -- asking -----------------------------------------------------------------------------------

    @property
    def asks(self) -> bool:
        """Whether this worker has something to say to all."""
        return bool(self._asked) or (self.period_controller is not None and self.period_controller.due)

    def ask(self, settings: Mapping[str, Any], revert: bool) -> TuneRequest:
        """Ask for a change; `RuleError` or `UnsupportedError` where it cannot be, and nobody hears of it then."""
        if revert and settings:
            raise RuleError(f"revert=True undoes the last change and takes no settings, got {', '.join(settings)}")
        changes = {} if revert else flat(settings)
        if not revert:
            self.tunables.check(changes)
        elif not self._stack and not any(not one.revert for one in [*self._asked, *self._decided]):
            raise RuleError(_NOTHING)
        return self._take(RequestFile("", changes, revert))

    def look(self, now: bool = False) -> None:
        """After every step: note where it is, and, at most once a second, take up what was asked for from outside."""
        if self.period_controller is not None:
            self.period_controller.stepped(*self.place())
        for request_file in self._request_files.look(now):
            self._take(request_file)

    def _take(self, request_file: RequestFile) -> TuneRequest:
        if self._each and not request_file.name:
            self._check_seen()
            request_file = self._request_files.put(request_file.changes, request_file.revert)
        request = TuneRequest(
            request_file.changes, request_file.revert, self._world.rank, request_file=request_file.name
        )
        request.number = next(self._numbers)
        if request_file.problem:
            self._refuse(request, request_file.problem)
        elif self._each or self._world.size == 1:
            self._now(request)
        else:
            self._asked.append(request)
        return request

    def _check_seen(self) -> None:
        """Refuse what not all workers would hear of."""
        folder = self._request_files.folder
        seen = folder is not None and all(_has_log(folder.parent, rank) for rank in range(self._world.size))
        if not seen:
            raise UnsupportedError(
                self._world.sign(
                    f"under {self.rule.text()} a change goes to the others through the log directory, and "
                    + (f"not all logs lie in {folder.parent}" if folder is not None else "this run has none")
                    + "; give all workers one on a file system that they share: attach(.., log=DIR)"
                )
            )

    # -- deciding ---------------------------------------------------------------------------------

    def exchange_requests(self, transport: Transport) -> None:
        """Gather what all ask for, and agree on what can be; every worker calls it at the same place.

        What was agreed on takes effect with `apply`.
        """
        self.decide(self.gather(transport))

    def gather(self, transport: Transport) -> GatheredRequests:
        """What all ask for and what each says to it; nothing is changed, so that it can be done once more."""
        mine, measured = (
            list(self._asked),
            self.period_controller.said() if self.period_controller is not None else None,
        )
        said = transport.gather_json([[[one.changes, one.revert, one.number] for one in mine], measured])
        requests = [self._request(rank, row, mine) for rank, (rows, _) in enumerate(said) for row in rows]
        verdicts = transport.gather_json([self._problem(one) for one in requests]) if requests else []
        return requests, verdicts, [row for _, row in said]

    def decide(self, heard: GatheredRequests) -> None:
        """Agree on what all can carry out."""
        requests, verdicts, measured = heard
        if self.period_controller is not None:
            found = self.period_controller.agree(measured, self.rule.paced, self.place()[0])
            if found is not None:
                self._decided.append(TuneRequest({"period": found[0]}, False, 0, why=found[1]))
        self._asked = [one for one in self._asked if one not in requests]
        for number, request in enumerate(requests):
            problems = [(rank, row[number]) for rank, row in enumerate(verdicts) if row[number]]
            if problems:
                rank, problem = problems[0]
                self._refuse(request, f"{problem} ({self._world.name(rank)})")
            else:
                self._decided.append(request)

    def _request(self, rank: int, row: list[Any], mine: list[TuneRequest]) -> TuneRequest:
        if rank == self._world.rank:
            return next(one for one in mine if one.number == row[2])
        return TuneRequest(dict(row[0]), bool(row[1]), rank)

    def among(self, world: World) -> None:
        """The workers are others, each of them one that the rule counts."""
        self._world, self.tunables.workers = world, world.size
        if self.period_controller is not None:
            self.period_controller.renew()

    def _problem(self, request: TuneRequest) -> str:
        """Why this worker cannot carry it out; nothing where it can."""
        if request.revert:
            return ""  # whether there is something to undo depends on what comes before it
        try:
            self.tunables.check(flat(request.changes))
        except PacelineError as error:
            return str(error)
        return ""

    # -- applying ---------------------------------------------------------------------------------

    @property
    def decided(self) -> bool:
        """Whether something waits to be applied."""
        return bool(self._decided)

    def apply(self) -> None:
        """Make what was agreed on, in rank order."""
        decided, self._decided = self._decided, []
        for request in decided:
            self._make(request)

    def _now(self, request: TuneRequest) -> None:
        before = self.rule
        self._make(request)
        if self.rule is not before:
            self.follow(self.rule)

    def _make(self, request: TuneRequest) -> None:
        problem = self._problem(request)  # an earlier request may have changed what can be; the same on all
        if request.revert and not self._stack:
            problem = _NOTHING
        if problem:
            self._refuse(request, problem)
            return
        request.block, request.minibatch = self.place()
        if request.revert:
            snapshot = self._stack.pop()
            names = self.tunables.names_in(snapshot)
            before = self.tunables.show(names)
            self.tunables.restore(snapshot)
            if self.period_controller is not None:
                self.period_controller.held = bool(snapshot.get("held"))
        else:
            names = list(request.changes)
            before = self.tunables.show(names)
            if not request.why:
                self._stack = [*self._stack, self._snapshot(request.changes)][-KEPT:]
            self.tunables.apply(request.changes)
        after = self.tunables.show(names)
        moved = [name for name in after if not request.revert or before[name] != after[name]]
        request.values = {name: [before[name], after[name]] for name in moved}
        self._applied(request)

    def _snapshot(self, changes: Changes) -> dict[str, Any]:
        """What takes back changes that somebody asked for; a period set by hand is held from now on."""
        found = self.tunables.snapshot(changes)
        if self.period_controller is not None:
            found["held"] = self.period_controller.held
            self.period_controller.held = self.period_controller.held or "period" in changes
        return found

    def _applied(self, request: TuneRequest) -> None:
        request.applied = True
        about: dict[str, Any] = {"by": request.by, "revert": request.revert, "changes": request.values}
        about["block"] = request.block
        if request.why:
            about["why"] = request.why
            if self._world.rank == 0:
                logger.info("period %d -> %d: %s", *(request.values or {})["period"], request.why)
        self._note("tune", **about, total_minibatches=request.minibatch)
        if request.by == self._world.rank and request.request_file:
            self._request_files.answer(request.request_file, {"applied": True, **about, "minibatch": request.minibatch})

    def _refuse(self, request: TuneRequest, problem: str) -> None:
        request.refused = problem
        if request.by != self._world.rank:
            return
        logger.warning("a request to tune was refused: %s", problem)
        self._note("tune", by=request.by, revert=request.revert, wanted=request.changes, refused=problem)
        if request.request_file:
            self._request_files.answer(request.request_file, {"applied": False, "refused": problem})

    def close(self) -> None:
        """The run is over: what nobody has heard is refused."""
        for request in [*self._asked, *self._decided]:
            self._refuse(request, "the run came to its end before the next exchange")
        self._asked, self._decided = [], []
        for request_file in self._request_files.look(now=True) if not self._each else []:
            self._request_files.answer(request_file.name, {"applied": False, "refused": "the run is over"})
        self.tunables.rates.close()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: the values, what can be taken back, and what this worker is about to ask for."""
        asked = [[one.changes, one.revert] for one in [*self._decided, *self._asked] if not one.why]
        pace = self.period_controller.state() if self.period_controller is not None else None
        return {"knobs": self.tunables.state(), "stack": self._stack, "asked": asked, "pace": pace}

    def load(self, state: dict[str, Any], asked: bool = True) -> None:
        """Put back what `state` gave; `asked` tells whether this worker also asks again."""
        self.tunables.load(state["knobs"])
        self._stack, self._decided = list(state["stack"]), []
        if self.period_controller is not None and state.get("pace") is not None:
            self.period_controller.load(state["pace"])
            if not asked:  # other workers than those that measured
                self.period_controller.renew()
        self._asked = [
            TuneRequest(dict(changes), bool(revert), self._world.rank, number=next(self._numbers))
            for changes, revert in (state["asked"] if asked else [])
        ]


_NOTHING = "there is no change to undo"


def _has_log(directory: Path, rank: int) -> bool:
    return (directory / log_name(rank, 1)).exists()
