# SPDX-License-Identifier: Apache-2.0
"""Grows the period and the number of workers while the held-out loss stays within a bound.

    share  = (bound - spent) / 2            for the next change; the whole rest for the last one
    begin    where the curve forecasts itself, and its margin after n points is at most share / 2
    keep     if  charge <= share;           spent += max(0, charge)
    withdraw if the excess is above share at the same confidence, or after the second look;
                                            spent += max(0, e) (M_end - M_begin) / M_end

A change is a period twice as long, or more workers. Its excess, its charge and the margin are those of
:mod:`.loss_curve`, over the n points after `SETTLE` of the new blocks; n is fixed before the change, so that looking
often does not help noise. If that does not decide, there is one more look at 2 n points; each has half of the error. A
withdrawn change is tried again after twice the samples. While the learning rate moves by more than `RATE`, a curve
forecasts nothing: nothing is begun, and what was begun is withdrawn. Workers that have joined cannot be sent away; then
no more of them join.

The bound is that of all changes against the setting at the beginning: at most `ERROR` of the changes that cost more
than their share are kept. It says nothing about what a kept change costs later than it was measured.

Source: ours. Shares of an error that is spent change by change are those of alpha spending (Lan & DeMets, Biometrika
1983).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.tuning.held_out import Row
from paceline.tuning.loss_curve import Excess, LossCurve, Point, steady

ERROR, LOOKS = 0.05, 2
CONFIDENCE = 1 - ERROR / LOOKS
SETTLE = 16
"""Blocks after a change that do not count: block momentum and the average of models follow it slowly."""
LEAST_AFTER = 6
"""The fewest points after a change."""
PARTS = (0.5, 0.7)
"""A curve is that of the points from one of these shares of the samples on."""
RATE = 1.05
"""The most by which the learning rate may differ within a comparison."""
AGAIN = 2.0
"""A withdrawn change is tried again after so many times the samples."""
LENGTH = 0.5
"""Of the samples before a change, within which it must be possible to decide it."""
WITHOUT_END = 4.0
"""A change that is not decided after so many times the samples is withdrawn."""
FINE = 256
"""Points nearer than this part of the samples are averaged."""
USED_UP = 0.05
"""Of the bound; a smaller rest is not spent."""


MORE = {"period": "a longer period", "workers": "a larger number of workers"}

Plan = tuple[LossCurve, int, float]
"""(the curve before a change, n, its share)."""


@dataclass(frozen=True)
class Place:
    """Where a run is; the same on all workers.

    Attributes:
        made: M, minibatches of all workers.
        period: at present.
        target: the period that measured times want.
        workers: k.
        grows: whether workers may join.
    """

    made: int
    period: int
    target: int
    workers: int
    grows: bool


@dataclass
class Trial:
    """A change that is being tried.

    Attributes:
        what: "period" or "workers".
        before, after: its values.
        began: M by then.
        counts: M from which points count.
        points: n.
        share: of the loss, that it may cost.
        rate: the learning rate by then.
        looks: that did not decide.
        void: why it cannot be decided; "" if it can.
    """

    what: str
    before: int
    after: int
    began: int
    counts: int
    points: int
    share: float
    rate: float
    looks: int = 0
    void: str = ""

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.what} {self.before} -> {self.after}"


class LossBound:
    """The changes of a run under a bound; all workers give it the same numbers and come to the same.

    Args:
        bound: the share of the held-out loss that all changes may cost together.

    Attributes:
        spent: what the kept changes cost at most, at their confidence, and the withdrawn ones for as long as they were.
        name: of the loss; "" before one is logged.
        kept, withdrawn: so many changes.
        told: (what was decided, its numbers), to be logged.
        blocked: why no change is tried at present; "" where one is, or none is wanted.
    """

    def __init__(self, bound: float) -> None:
        self.bound, self.spent, self.name = bound, 0.0, ""
        self.blocked = ""
        self.kept = self.withdrawn = 0
        self.told: list[tuple[str, dict[str, Any]]] = []
        self._points: list[list[float]] = []  # M at first, ln L, rate, logged losses, M at last
        self._since = 0.0  # the present setting is in effect from there on
        self._again: dict[str, float | None] = {"period": 0.0, "workers": 0.0}  # None for never
        self._trial: Trial | None = None
        self._curve: LossCurve | None = None
        self._armed: Plan | None = None  # for workers that may join now
        self._made = self._workers = self._period = 0

    # -- points -----------------------------------------------------------------------------------

    def _add(self, row: Row) -> None:
        made, loss, rate = row
        if loss is None:
            if self._trial is not None:
                self._trial.void = "the held-out loss is not a finite number above 0"
            return
        last = self._points[-1] if self._points else None
        new = last is None or any(last[0] < mark <= made for mark in self._marks)
        if last is None or new or made - last[0] > made / FINE or not _alike(last[2], rate):
            self._points.append([made, math.log(loss), rate, 1, made])
        else:
            last[1] += (math.log(loss) - last[1]) / (last[3] + 1)
            last[3], last[4] = last[3] + 1, made
        if self._trial is None:
            self._points = [one for one in self._points if one[4] >= PARTS[0] * made]

    @property
    def _marks(self) -> list[float]:
        """Points on both sides of these are not averaged."""
        return [self._since] if self._trial is None else [self._since, self._trial.began, self._trial.counts]

    def _base(self, part: float) -> list[Point]:
        """The points under the present setting, from a share of the samples on, at the present learning rate."""
        found: list[Point] = []
        for made, loss, rate, _, last in reversed(self._points):
            if made < max(self._since, part * self._made) or not _alike(rate, self._points[-1][2]):
                break
            found.append(((made + last) / 2, loss))
        return found[::-1]

    # -- deciding ---------------------------------------------------------------------------------

    def look(self, now: Place, rows: Sequence[Row]) -> tuple[int, str] | None:
        """(a new period, why), or None if it stays.

        Args:
            now: where the run is.
            rows: the losses that were logged since the last look.
        """
        self._made, self._period = max(self._made, now.made), now.period
        self._workers = self._workers or now.workers
        for row in rows:
            self._add(row)
        self._armed = None
        if self._trial is not None:
            return self._judge(self._trial)
        if now.period > now.target:
            self._settle(now.target, now.workers)
            return now.target, "measured times want no longer one"
        if now.period < now.target:
            after = min(2 * now.period, now.target)
            last = after == now.target and not now.grows
            plan = self._plan("period", after * now.workers, last)
            if plan is not None:
                return after, self._begin("period", now.period, after, after * now.workers, plan)
        else:
            self.blocked = ""
        if now.grows:
            self._armed = self._plan("workers", 2 * now.workers * now.period, last=False)
        return None

    @property
    def may_grow(self) -> bool:
        """Whether workers may join now."""
        return self._armed is not None

    def _begin(self, what: str, before: int, after: int, block: int, plan: Plan) -> str:
        """Begin a change to blocks of so many minibatches of all workers; says how."""
        self._curve, count, share = plan
        counts = self._made + SETTLE * block
        self._trial = Trial(what, before, after, self._made, counts, count, share, self._points[-1][2])
        self.blocked, self._armed = "", None
        text = f"tried for {count} held-out losses after {counts:,} minibatches; it may cost {_percent(share)}"
        self._tell("tried", f"{self._trial.text} is {text}", share=share)
        return text

    def _plan(self, what: str, block: int, last: bool) -> Plan | None:
        """(the curve, n, the share) of a change to blocks of so many minibatches; None if none can be tried."""
        again, share = self._again[what], self._share(last)
        if again is None or self._made < again:
            return self._block(f"{MORE[what]} had to be withdrawn, and the samples have not doubled since it began")
        if share <= USED_UP * self.bound:
            return self._block("the bound is used up")
        bases = [self._base(part) for part in PARTS]
        curve, base = next(
            ((curve, base) for base in bases if (curve := steady(base, CONFIDENCE)) is not None), (None, bases[0])
        )
        if curve is None:
            return self._block("the held-out loss is on no steady curve yet, or the learning rate moves")
        step, first = (base[-1][0] - base[0][0]) / (len(base) - 1), self._made + SETTLE * block
        most = int(((1 + LENGTH) * self._made - first) / step)
        count = LEAST_AFTER
        while count <= most:
            xs = [first + (k + 0.5) * step for k in range(count)]
            if curve.margin(xs, CONFIDENCE) <= share / 2:
                return curve, count, share
            count += 1 + count // 8
        return self._block(
            f"the held-out loss scatters by {_percent(curve.noise)}, so that a change by {_percent(share)} is not seen "
            f"in {100 * LENGTH:g} % more samples: log it more often, or over more held-out data"
        )

    def _share(self, last: bool) -> float:
        """Of the loss, that the next change may cost."""
        return (self.bound - self.spent) * (1.0 if last else 0.5)

    # -- branches ---------------------------------------------------------------------------------

    def branch(self, now: Place) -> tuple[int, float] | None:
        """(the period of a branch that is to be tried beside the present one, its share); None for none.

        For simulations, which can train on from one state under both; then `branched` decides.
        """
        after, again = min(2 * now.period, now.target), self._again["period"]
        share = self._share(last=after == now.target and not now.grows)
        if after <= now.period or again is None or now.made < again or share <= USED_UP * self.bound:
            return None
        return after, share

    def branched(self, now: Place, after: int, share: float, found: Excess) -> bool:
        """Whether the branch with the period `after` is kept.

        Args:
            now: where both began.
            after, share: of `branch`.
            found: what it cost.
        """
        keeps = found.most <= share
        if keeps:
            self.spent, self.kept = self.spent + max(0.0, found.most), self.kept + 1
        else:
            self.withdrawn, self._again["period"] = self.withdrawn + 1, AGAIN * now.made
        did = f"kept; {_percent(self.spent)} are spent" if keeps else f"not kept; it may cost {_percent(share)}"
        text = f"its held-out loss is {_percent(found.mean)} (+- {_percent(found.margin)}) above the other branch's"
        event = "kept" if keeps else "withdrawn"
        self._tell(event, f"period {now.period} -> {after} is {did}: {text}", excess=found.mean, margin=found.margin)
        return keeps

    def _block(self, why: str) -> Plan | None:
        """Remember why nothing is tried: no plan."""
        self.blocked = why
        return None

    def _judge(self, trial: Trial) -> tuple[int, str] | None:
        """Keep or withdraw the change, or wait for more points."""
        assert self._curve is not None
        after: list[Point] = [((one[0] + one[4]) / 2, one[1]) for one in self._points if one[0] >= trial.counts]
        if self._points and not _alike(self._points[-1][2], trial.rate):
            trial.void = trial.void or "the learning rate moves, so that the curve before forecasts nothing"
        if not trial.void and self._made > WITHOUT_END * trial.began and len(after) < trial.points:
            trial.void = f"only {len(after)} of {trial.points} held-out losses came"
        found = self._curve.excess(after, CONFIDENCE) if len(after) >= LEAST_AFTER else Excess(0.0, 0.0)
        if trial.void:
            return self._end(trial, found, trial.void, self._made)
        if len(after) < LEAST_AFTER:
            return None
        text = f"the held-out loss is {_percent(found.mean)} (+- {_percent(found.margin)}) above the forecast"
        due = len(after) >= trial.points * (trial.looks + 1)
        if found.least > trial.share or (due and found.most > trial.share and trial.looks == LOOKS - 1):
            return self._end(trial, found, f"{text}, and it may cost {_percent(trial.share)}", AGAIN * trial.began)
        if due and found.most <= trial.share:
            self.spent, self.kept = self.spent + max(0.0, found.most), self.kept + 1
            self._trial, self._since = None, trial.counts
            kept = f"{trial.text} is kept: {text}; {_percent(self.spent)} of {_percent(self.bound)} are spent"
            self._tell("kept", kept, excess=found.mean, margin=found.margin)
        elif due:
            trial.looks += 1
            self._tell("undecided", f"{trial.text} is not decided: {text}", excess=found.mean, margin=found.margin)
        return None

    def _end(self, trial: Trial, found: Excess, why: str, again: float) -> tuple[int, str] | None:
        """Withdraw a change; what it cost lasts for its part of the samples."""
        self._trial, self.withdrawn = None, self.withdrawn + 1
        part = 1.0 - trial.began / self._made
        self._again[trial.what] = again
        if trial.what == "workers":  # they stay, and what they cost is spent
            self._again["workers"], self._since = None, trial.counts
            self.spent += max(0.0, found.most)
            self._tell("withdrawn", f"{trial.text}: {why}; they stay, and no more join", share=trial.share)
            return None
        self.spent += part * max(0.0, found.mean)
        self._settle(trial.after, self._workers)
        self._tell("withdrawn", f"{trial.text} is withdrawn: {why}", share=trial.share)
        return trial.before, f"withdrawn: {why}"

    def _settle(self, period: int, workers: int) -> None:
        """The setting changes without a trial: what is logged soon belongs to none."""
        self._since = self._made + SETTLE * period * workers

    def _tell(self, event: str, text: str, **numbers: float) -> None:
        facts = {name: round(value, 6) for name, value in {"spent": self.spent, **numbers}.items()}
        self.told.append((f"within {_percent(self.bound)}: {text}", {"event": event, **facts}))

    # -- changes from elsewhere -------------------------------------------------------------------

    def among(self, workers: int) -> None:
        """So many workers train from now on."""
        before, self._workers = self._workers, workers
        if before in (0, workers):
            return
        if self._trial is not None:
            self._trial.void = self._trial.void or f"the number of workers is {workers} now, and was {before}"
        elif self._armed is not None and workers > before:
            self._begin("workers", before, workers, self._period * workers, self._armed)
        else:
            self._settle(self._period, workers)
        self._armed = None

    def drop(self) -> None:
        """The user has set the period: no trial goes on."""
        self._trial, self._armed, self._since = None, None, float(self._made)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON values."""
        return {
            "spent": self.spent,
            "name": self.name,
            "armed": [asdict(self._armed[0]), *self._armed[1:]] if self._armed is not None else None,
            "counts": [self.kept, self.withdrawn],
            "points": [list(one) for one in self._points],
            "since": self._since,
            "again": dict(self._again),
            "trial": asdict(self._trial) if self._trial is not None else None,
            "curve": asdict(self._curve) if self._curve is not None else None,
            "place": [self._made, self._workers, self._period],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        self.spent, self.name, armed = state["spent"], state["name"], state["armed"]
        self._armed = (LossCurve(**armed[0]), armed[1], armed[2]) if armed is not None else None
        self.kept, self.withdrawn = state["counts"]
        self._points, self._since = [list(one) for one in state["points"]], state["since"]
        self._again = dict(state["again"])
        self._trial = Trial(**state["trial"]) if state["trial"] is not None else None
        self._curve = LossCurve(**state["curve"]) if state["curve"] is not None else None
        self._made, self._workers, self._period = state["place"]


def _alike(one: float, other: float) -> bool:
    return max(one, other) <= RATE * min(one, other)


def _percent(share: float) -> str:
    return f"{round(100 * share, 4):.2g} %"
