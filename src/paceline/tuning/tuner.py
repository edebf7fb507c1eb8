# SPDX-License-Identifier: Apache-2.0
"""Changes settings on all workers at the same step.

If workers exchange together, a worker with a request says so in the header of its next exchange. Between that exchange
and the next, all workers gather all requests, vote on whether they can apply them, and apply them in rank order: each
request on every worker, or on none.

Under asynchronous rules there is no such step. There a request goes through the log directory, which all workers must
see, and each worker applies it before its next push. Changes can be undone, the last one first.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.communication import Transport
from paceline.core.world import World
from paceline.errors import PacelineError, RuleError, UnsupportedError
from paceline.observe.event_log import log_name
from paceline.rules.choice import COSTS, Choice, in_short, named
from paceline.rules.rule import RecipeCall, Rule
from paceline.tuning.names import Changes, flat
from paceline.tuning.period_controller import PeriodController
from paceline.tuning.request_files import RequestFiles, TuneRequest
from paceline.tuning.rule_chooser import RuleChooser
from paceline.tuning.speeds import Speeds
from paceline.tuning.sync_scaling import WARMUP
from paceline.tuning.tunables import Tunables


class MeasuredChoices:
    """The chooser of the rule and the controller of the period, where the rule has them.

    Args:
        tunables: the settings.
        chooser: of the rule, if a probe chooses it.
        period_controller_for: makes one for a rule whose period follows times, given whether they have chosen it.
        kind: the recipe that makes the same blocks as `auto`.
        speeds: of the workers, where they may make unequal blocks.

    Attributes:
        period_controller: set under rules whose period follows measured times.
    """

    def __init__(
        self,
        tunables: Tunables,
        chooser: RuleChooser | None = None,
        period_controller_for: Callable[[Rule, bool], PeriodController] | None = None,
        kind: str = "bmuf",
        speeds: Speeds | None = None,
    ) -> None:
        self.tunables, self.chooser, self.speeds = tunables, chooser, speeds
        self._period_controller_for, self._kind = period_controller_for, kind
        self.period_controller: PeriodController | None = None
        self.resized = False  # whether the workers' minibatches in a block have changed, and blocks do not follow yet
        self.place: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns (exchanged blocks, minibatches of this worker) at present."""

    # -- measuring --------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether it is time to gather the measurements."""
        return any(one is not None and one.due for one in (self.period_controller, self.chooser, self.speeds))

    def stepped(self) -> None:
        for one in self.period_controller, self.chooser, self.speeds:
            if one is not None:
                one.stepped(*self.place())

    def measurements(self) -> Any:
        """This worker's measurements as JSON values, of period, rule and speeds; each None before there are enough."""
        measured = self.period_controller, self.chooser, self.speeds
        return [one.measurements() if one is not None else None for one in measured]

    def agree(self, measured: Sequence[Any]) -> tuple[Changes, str] | None:
        """Choose, the same on every worker; (what else changes, why), or None. `measured`: of each worker."""
        paces, choices, rows = zip(*measured, strict=True)
        rule, timed = self.tunables.rule, self.probing
        if self.chooser is not None:
            self.chooser.agree(choices)
        if timed and self.chosen is not None and self.chooser is not None:  # what the probe has timed
            rule = self.chooser.rule
            rows = tuple([True, one and one[1], row and row[2]] for one, row in zip(choices, rows, strict=True))
        if self.speeds is not None and rule.schedule.exchanges_blocks and not self.probing:
            self.resized |= self.speeds.agree(rows, rule.blocks)
        return self.period_controller.agree(paces, self.tunables.rule.paced) if self.period_controller else None

    # -- the rule ---------------------------------------------------------------------------------

    @property
    def probing(self) -> bool:
        """Whether a probe is under way."""
        return self.chooser is not None and self.chooser.probing

    @property
    def chosen(self) -> Choice | None:
        """A choice of the rule that has not taken effect yet."""
        return self.chooser.choice if self.chooser is not None and self.chooser.pending else None

    @property
    def gave_up(self) -> bool:
        """Whether a probe ended before this step, which exchanges no gradients."""
        return self.chooser is not None and self.chooser.pending and self.chooser.gave_up

    def end_probe(self, why: str) -> None:
        """Choose blocks without further times, because gradients cannot be exchanged."""
        if self.chooser is not None and self.probing:
            self.chooser.give_up(why, self.place()[1])

    def rule_of(self, saved: dict[str, Any] | None) -> Rule:
        """The rule under which a checkpoint was made, with its choice."""
        return self.tunables.rule if self.chooser is None else self.chooser.rule_of(saved)

    @property
    def text(self) -> str:
        """The present rule, as it can be asked for."""
        return named(self.tunables.rule, self._kind).text()

    def line(self, why: str) -> str:
        """What the user sees of a choice."""
        rule, again, chooser = self.tunables.rule, self.text, self.chooser
        if chooser is not None and chooser.scaling is not None:
            again = replace(chooser.asked, name=RecipeCall("auto", {**chooser.asked.arguments, "share": 0.99})).text()
        rate = "" if rule.schedule.exchanges_blocks else self.rate
        return f'auto: {in_short(rule, self._kind)}{rate}: {why}. To repeat: --rule "{again}"'

    @property
    def rate(self) -> str:
        """The learning rate, where it is not the program's."""
        rates = self.tunables.rates
        if rates.sync is None:
            return "" if rates.common == 1 else f", the learning rate {rates.common:.3g} times one worker's"
        most = max(rates.sync.highest(optimizer) for optimizer, _ in rates.groups())
        how = "as more workers train together" if rates.sync.takes_turns else f"in {WARMUP} steps"
        return f", the learning rate rising to {most:.3g} times one worker's {how}"

    def use(self, rule: Rule) -> None:
        """Continue with this rule: with the rates of its workers, and a controlled period where no probe is made."""
        self.tunables.rule = rule
        self.follow_workers()
        make, choice = self._period_controller_for, self.chooser.choice if self.chooser is not None else None
        controlled = make is not None and rule.schedule.follows_times and not self.probing
        timed = choice is not None and not choice.blind
        self.period_controller = make(rule, timed) if make is not None and controlled else None

    def follow_workers(self) -> None:
        """Give the local learning rates the factor that the rule has for this number of workers, none in a probe."""
        sync = self.chooser.scaling if self.chooser is not None else None
        factor = 1.0 if self.probing else self.tunables.rule.rate_factor(self.tunables.workers)
        self.tunables.rates.scale_all(factor, sync, lambda: self.place()[1])

    # -- checkpoints ------------------------------------------------------------------------------

    def load_choice(self, state: dict[str, Any], same: bool) -> dict[str, Any]:
        """Continue with the choice in the tuner's `state`, or begin the probe on another number of workers; the numbers
        to load. `same`: whether the state is this worker's own."""
        saved, chooser, steps = state.get("choice"), self.chooser, self.place()[1]
        knobs: dict[str, Any] = state["knobs"]
        if chooser is not None:
            if same or state.get("pace") is not None or (saved is not None and saved["choice"] is not None):
                chooser.load(saved, steps)
            else:
                chooser.renew(steps)
            self.use(chooser.rule)
        if saved is not None:  # before 2026-11-29 the factors had that of the number of workers
            factors = [[number, one / float(saved.get("factor", 1.0))] for number, one in knobs["factors"]]
            knobs = {"rule": knobs["rule"] if same or chooser is not None else None, "factors": factors}
        return knobs


logger = logging.getLogger("paceline")

GatheredRequests = tuple[list[TuneRequest], list[Any], list[Any]]
"""(requests of all workers, each worker's objections, each worker's measured times)."""

KEPT = 100
"""The most changes that can be undone."""


class Tuner:
    """One worker's requests, and the changes of all workers.

    Args:
        measured: what measured times change.
        world: this worker.
        request_files: requests from outside the run; every worker reads each where workers exchange alone.
        note: writes an event.
    """

    def __init__(
        self, measured: MeasuredChoices, world: World, request_files: RequestFiles, note: Callable[..., None]
    ) -> None:
        self.measured, self.tunables = measured, measured.tunables
        self._world, self._request_files = world, request_files
        self._note, self._each = note, request_files.each
        self.follow: Callable[[Rule], None] = lambda rule: None
        """Called with the rule after a change that waits for no exchange."""
        self._asked: list[TuneRequest] = []
        self._decided: list[TuneRequest] = []
        self._stack: list[dict[str, Any]] = []
        self._numbers = itertools.count(1)

    @property
    def rule(self) -> Rule:
        return self.tunables.rule

    def begin(self, place: Callable[[], tuple[int, int]], follow: Callable[[Rule], None] | None) -> None:
        """The run is built; `place` returns (exchanged blocks, minibatches of this worker)."""
        self.measured.place, self.follow = place, follow or self.follow

    # -- asking -----------------------------------------------------------------------------------

    @property
    def asks(self) -> bool:
        """Whether this worker has a request, or measurements to gather."""
        return bool(self._asked) or self.measured.due

    def ask(self, settings: Mapping[str, Any], revert: bool) -> TuneRequest:
        """Request a change; raises `RuleError` or `UnsupportedError` if this worker cannot make it."""
        if revert and settings:
            raise RuleError(f"revert=True undoes the last change and takes no settings, got {', '.join(settings)}")
        changes = {} if revert else flat(settings)
        if not revert:
            self.tunables.check(changes)
        elif not self._stack and not any(not one.revert for one in [*self._asked, *self._decided]):
            raise RuleError(_NOTHING)
        name = ""
        if self._each:  # all workers have to see the request
            folder, ranks = self._request_files.folder, range(self._world.size)
            if folder is None or not all((folder.parent / log_name(rank, 1)).exists() for rank in ranks):
                raise UnsupportedError(
                    self._world.sign(
                        f"under {self.rule.text()} a change goes to other workers through the log directory, and "
                        + (f"not all logs lie in {folder.parent}" if folder is not None else "this run has none")
                        + "; give all workers one on a file system that they share: attach(.., log=DIR)"
                    )
                )
            name = self._request_files.put(changes, revert)
        return self._take(TuneRequest(changes, revert, request_file=name))

    def look(self, now: bool = False) -> None:
        """After every step: time it, and at most once a second look for request files."""
        measured = self.measured
        if measured.period_controller or measured.chooser or measured.speeds:
            measured.stepped()
        if self._request_files.folder is not None:
            for request in self._request_files.look(now):
                self._take(request)

    def _take(self, request: TuneRequest) -> TuneRequest:
        request.by, request.number = self._world.rank, next(self._numbers)
        if request.refused:
            self._refuse(request, request.refused)
        elif self._each or self._world.size == 1:
            before = self.rule
            self._make(request)
            if self.rule is not before:
                self.follow(self.rule)
        else:
            self._asked.append(request)
        return request

    # -- deciding ---------------------------------------------------------------------------------

    def exchange_requests(self, transport: Transport) -> None:
        """Gather all requests and vote on them; every worker calls it at the same step, and `apply` afterwards."""
        self.decide(self.gather(transport))

    def gather(self, transport: Transport) -> GatheredRequests:
        """Gather all requests and votes; changes nothing, so that it can be retried."""
        own = {one.number: one for one in self._asked}
        mine = [[one.changes, one.revert, one.number] for one in self._asked]
        answers = transport.gather_json([mine, self.measured.measurements()])
        requests = [
            own[number] if rank == self._world.rank else TuneRequest(dict(changes), bool(revert), rank)
            for rank, (rows, _) in enumerate(answers)
            for changes, revert, number in rows
        ]
        verdicts = transport.gather_json([self._problem(one) for one in requests]) if requests else []
        if self.measured.probing and self.measured.chooser is not None:
            self.measured.chooser.time_more(transport, [row[1] for _, row in answers])
        return requests, verdicts, [row for _, row in answers]

    def decide(self, gathered: GatheredRequests) -> None:
        """Accept the requests that all workers can apply, and refuse the others."""
        requests, verdicts, measured = gathered
        if (change := self.measured.agree(measured)) is not None:
            self._decided.append(TuneRequest(change[0], False, 0, why=change[1]))
        self._asked = [one for one in self._asked if one not in requests]
        for number, request in enumerate(requests):
            problems = [(rank, row[number]) for rank, row in enumerate(verdicts) if row[number]]
            if problems:
                rank, problem = problems[0]
                self._refuse(request, f"{problem} ({self._world.name(rank)})")
            else:
                self._decided.append(request)

    def among(self, world: World) -> None:
        """The membership changed; the rule counts each worker of `world`."""
        self._world = world
        self.tunables.workers = world.size
        self.measured.follow_workers()
        if self.measured.period_controller is not None:
            self.measured.period_controller.renew()

    def _problem(self, request: TuneRequest) -> str:
        """Why this worker cannot apply a request; empty if it can."""
        if request.revert or request.why:
            return ""  # whether there is a change to undo depends on the requests before it; measured ones fit
        try:
            self.tunables.check(flat(request.changes))
        except PacelineError as error:
            return str(error)
        return ""

    # -- the rule ---------------------------------------------------------------------------------

    def take_choice(self) -> Rule | None:
        """The rule that was chosen, if that has not taken effect yet; it does now."""
        measured, before = self.measured, self.rule
        chooser, chosen = measured.chooser, measured.chosen
        if chooser is None or chosen is None:
            return None
        chooser.pending = False
        measured.use(chooser.rule)
        if (sync := self.tunables.rates.sync) is not None:
            sync.take_over(self.tunables.rates.groups())
        if self.rule.schedule.exchanges_blocks:  # keep the numbers that were set during the probe
            self.tunables.rule = replace(self.rule, outer=before.outer)
            if before.schedule.period != chooser.asked.schedule.period:
                period = max(before.schedule.period, self.rule.schedule.overlap)
                self.tunables.rule = replace(self.rule, schedule=replace(self.rule.paced, period=period))
                if measured.period_controller is not None:
                    measured.period_controller.held = True
        else:
            self._stack = []  # of numbers that this rule has not
        self._tell_rule(chosen.why, chosen.blind)
        if self._world.rank == 0 and (codec := self.rule.arguments.get("codec")) in COSTS:
            logger.warning("auto: %s costs %s; in bf16 no exchange fits blocks of a good length", codec, COSTS[codec])
        return self.rule

    def note_rate(self) -> None:
        """At attach: log where the learning rate is not the program's and no choice of the rule will tell."""
        measured, rule = self.measured, self.rule
        if (rate := measured.rate) and not measured.probing:
            problem = measured.chooser.unprobed if measured.chooser is not None else ""
            unprobed = f" without a probe: {problem}" if problem else ""
            why = f"{rule.name}: blocks of {rule.schedule.period} minibatches{unprobed}{rate}"
            self._note("rule", rule=rule.text(), why=why, total_minibatches=0)

    def _tell_rule(self, why: str, blind: bool = False) -> None:
        """In one line, but for a `blind` choice, which times will change; and in the log."""
        measured, at, saved = self.measured, self.measured.place()[1], None
        if self._world.rank == 0 and not blind:
            logger.warning("%s", measured.line(why))
        why = f"auto: {why}{measured.rate}"
        if measured.chooser is not None and (choice := measured.chooser.choice) is not None:
            schedule = self.rule.schedule  # a run that is started again takes the present choice from the log
            saved = replace(choice, period=schedule.period, overlap=schedule.overlap).json()
        self._note("rule", rule=measured.text, why=why, choice=saved, total_minibatches=at)

    # -- applying ---------------------------------------------------------------------------------

    @property
    def decided(self) -> bool:
        """Whether accepted requests wait for `apply`, or other blocks."""
        return bool(self._decided) or self.measured.resized

    def apply(self) -> None:
        """Apply the accepted requests in rank order."""
        decided, self._decided, self.measured.resized = self._decided, [], False
        for request in decided:
            self._make(request)

    def _make(self, request: TuneRequest) -> None:
        # may depend on an earlier request, alike on all workers
        problem = _NOTHING if request.revert and not self._stack else self._problem(request)
        if problem:
            self._refuse(request, problem)
            return
        request.block, request.minibatch = self.measured.place()
        controller = self.measured.period_controller
        undone = self._stack.pop() if request.revert else None
        names = list(request.changes) if undone is None else self.tunables.names_in(undone)
        before = self.tunables.show(names)
        if undone is not None:
            self.tunables.restore(undone)
            if controller is not None:
                controller.held = bool(undone.get("held"))
        else:
            if not request.why:
                snapshot = self.tunables.snapshot(request.changes)
                if controller is not None:  # a requested period is held from now on
                    snapshot["held"] = controller.held
                    controller.held = controller.held or "period" in request.changes
                self._stack = [*self._stack, snapshot][-KEPT:]
            self.tunables.apply(request.changes)
        after = self.tunables.show(names)
        moved = [name for name in after if not request.revert or before[name] != after[name]]
        request.values = {name: [before[name], after[name]] for name in moved}
        request.applied = True
        about = {"by": request.by, "revert": request.revert, "changes": request.values, "block": request.block}
        if request.why:
            about["why"] = request.why
            self._tell_rule(request.why)
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
        """The run is over: refuse pending requests."""
        for request in [*self._asked, *self._decided]:
            self._refuse(request, "the run came to its end before the next exchange")
        self._asked, self._decided = [], []
        for request in self._request_files.look(now=True) if not self._each else []:
            self._request_files.answer(request.request_file, {"applied": False, "refused": "the run is over"})
        self.tunables.rates.close()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: values, changes that can be undone, and this worker's pending requests."""
        asked = [[one.changes, one.revert] for one in [*self._decided, *self._asked] if not one.why]
        controller, chooser = self.measured.period_controller, self.measured.chooser
        pace = controller.state() if controller is not None else None
        state: dict[str, Any] = {"knobs": self.tunables.state(), "stack": self._stack, "asked": asked, "pace": pace}
        if self.measured.speeds is not None:
            state["speeds"] = self.measured.speeds.state()
        return state if chooser is None else {**state, "choice": chooser.state()}

    def load(self, state: dict[str, Any], asked: bool = True) -> None:
        """Restore `state`; with `asked`, also its pending requests, else the state is another worker's."""
        self.tunables.load(self.measured.load_choice(state, asked))
        self._stack, self._decided = list(state["stack"]), []
        controller = self.measured.period_controller
        if controller is not None and state.get("pace") is not None:
            controller.load(state["pace"])
            if not asked:  # the state is another worker's
                controller.renew()
        if self.measured.speeds is not None and "speeds" in state:
            self.measured.speeds.load(state["speeds"])
        self._asked = [
            TuneRequest(dict(changes), bool(revert), self._world.rank, number=next(self._numbers))
            for changes, revert in (state["asked"] if asked else [])
        ]


_NOTHING = "there is no change to undo"
