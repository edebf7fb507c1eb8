# SPDX-License-Identifier: Apache-2.0
"""The settings of a run that can change while it trains: those of its optimizers' groups, and numbers of its rule.

Of rates:

- `lr_factor=f` multiplies the rate from now on, whether a torch scheduler, the program or neither sets it. It is
  applied only during a step (`Rates`), so every schedule continues.
- `lr=x` on a group without a scheduler writes x into the group and drops an earlier factor. On a group with a torch
  scheduler (which has marked the group with `initial_lr`), the rate is x now and the schedule continues in proportion:
  the factor becomes x over the scheduler's rate. If a program writes the rate itself at every step, it overwrites x,
  and only `lr_factor` helps.
- A program that makes its own steps (:mod:`paceline.doors.adapters`) reads its settings by `run.tuned(name, default)`.
  What it has asked for can be tuned. Its rate counts as one with a scheduler.
- Where the number of workers grows (:mod:`paceline.rules.schedule.growth`), settings are about the rate of one worker.

Of the rule's outer step, either number can change while the other stays, or `gain` changes both; a gain in words
follows the number of workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline.errors import RuleError, UnsupportedError
from paceline.rules.rule import RecipeCall, Rule
from paceline.tuning.names import OF_RULES, Changes, checked, split
from paceline.tuning.sync_scaling import SyncScaling

Group = dict[str, Any]


class Rates:
    """Makes the optimizers' steps with each group's rate times its factor.

    A schedule may write a group's rate at every step, from its own state. So a factor is applied only during the
    optimizer's step, and the rate is restored afterwards: the schedule and the program see only the schedule's rates.
    What the step itself writes into the rate (an optimizer with a schedule of its own) is kept, without the factor.

    Attributes:
        factors: number of a group, counted through all optimizers -> factor; 1 if missing.
        common: a further factor of all groups, which follows from the number of workers and is no setting.
        sync: of synchronous steps of several workers; None leaves the optimizers as they are.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self._optimizers = optimizers
        self.factors: dict[int, float] = {}
        self.common = 1.0
        self.sync: SyncScaling | None = None
        self._steps: Callable[[], int] = lambda: 0
        self._stepping: Optimizer | None = None  # its step is under way
        self._kept: list[tuple[Group, str, Any, Any, float]] = []  # group, key, its own value, that applied, the factor
        self._handles = [optimizer.register_step_pre_hook(self._before) for optimizer in optimizers]
        self._handles += [optimizer.register_step_post_hook(self._after) for optimizer in optimizers]

    def groups(self) -> list[tuple[Optimizer, Group]]:
        """The groups in the order of their numbers; read each time, because loading a state replaces them."""
        return [(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups]

    def scale_all(self, factor: float, sync: SyncScaling | None, steps: Callable[[], int]) -> None:
        """Give all groups a common factor; in the middle of a step it holds for that step already. `steps` returns how
        many the run has made."""
        self.common, self.sync, self._steps = factor, sync, steps
        if self._stepping is not None:
            self._put_back()
            self._apply(self._stepping)

    def factor(self, number: int) -> float:
        return self.factors.get(number, 1.0)

    def of_workers(self, optimizer: Optimizer) -> float:
        """The factor of the next step that is no setting."""
        return self.common if self.sync is None else self.common * self.sync.rate(optimizer, self._steps() + 1)

    def scale(self, number: int, factor: float) -> None:
        self.factors.pop(number, None)
        if factor != 1:
            self.factors[number] = factor

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._put_back(1.0)  # the last step may have raised, and the program may have written a rate since
        self._stepping = optimizer
        if self.factors or self.common != 1 or self.sync is not None:
            self._apply(optimizer)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepping = None
        self._put_back()

    def _apply(self, only: Optimizer | None) -> None:
        for number, (optimizer, group) in enumerate(self.groups()):
            if only is not None and optimizer is not only:
                continue
            if self.sync is not None and "betas" in group:
                own = group["betas"]
                group["betas"] = self.sync.betas(optimizer, own, self._steps() + 1)
                self._kept.append((group, "betas", own, group["betas"], 1.0))
            factor = self.of_workers(optimizer) * self.factor(number)
            if factor == 1 or "lr" not in group:
                continue
            rate = group["lr"]
            if isinstance(rate, Tensor):  # a captured graph may hold its address
                kept = rate.clone()
                self._kept.append((group, "lr", kept, rate.mul_(factor).clone(), factor))
            else:
                group["lr"] = rate * factor
                self._kept.append((group, "lr", rate, group["lr"], factor))

    def _put_back(self, over: float | None = None) -> None:
        """Restore what is the group's own; a rate written meanwhile stays, divided by `over`, by default its factor."""
        while self._kept:
            group, key, own, applied, factor = self._kept.pop()
            now = group[key]
            if key == "betas":
                group[key] = own if now is applied else now
                continue
            written = now / (over or factor or 1.0)
            if isinstance(now, Tensor):  # compared where it is
                write_rate(group, torch.where(now == applied, torch.as_tensor(own).to(now), written))
            else:
                write_rate(group, own if now == applied else written)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, all groups show their rates times their factors."""
        self._put_back()
        self._apply(None)
        try:
            yield
        finally:
            self._put_back()

    def close(self) -> None:
        self._put_back()
        for handle in self._handles:
            handle.remove()
        self._handles = []


def write_rate(group: Group, rate: Any) -> None:
    """Write a group's rate; in place where it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(rate) if isinstance(rate, Tensor) else group["lr"].fill_(rate)
    else:
        group["lr"] = rate


OVERLAP = "overlap"
"""A number of the rule that measured times change, together with the period; no request can."""
OUTER = ("momentum", "lr", "gain")
"""The tunable fields of an outer step."""
SCHEDULED = "initial_lr"
"""A torch scheduler puts this key into its groups."""
ASKED = "asked"
"""Key of the settings that a program has asked for, in a group whose steps the program makes itself."""


class Tunables:
    """Checks, applies, shows and undoes changes.

    Attributes:
        rule: at present.
        workers: N at present, as the rule counts them; the same on all workers whenever a setting changes.
        fixed: whether nothing can be changed: several processes train one model, and have no common place for it.
    """

    def __init__(self, optimizers: list[Optimizer], rule: Rule, workers: int, fixed: bool = False) -> None:
        self.rule, self.workers, self.fixed = rule, workers, fixed
        self.rates = Rates(optimizers)

    # -- checking ---------------------------------------------------------------------------------

    def check(self, changes: Changes) -> None:
        """Raise `RuleError` or `UnsupportedError` if a change is impossible; changes nothing."""
        if self.fixed:
            raise UnsupportedError(
                "several processes train the model of a worker together, and would not take the change at one step; "
                "let each of them write its optimizer's settings"
            )
        self._rule_with({name: value for name, value in changes.items() if name in OF_RULES})
        for name, value in changes.items():
            checked(name, value)
            if name not in OF_RULES:
                for number, optimizer, group in self._groups(name):
                    self._check_group(name, value, number, optimizer, group)
        for number in range(len(self.rates.groups())):
            if all(base in changes or f"{base}@{number}" in changes for base in ("lr", "lr_factor")):
                raise RuleError(f"lr and lr_factor of group {number} cannot both change; choose one")

    def _groups(self, name: str) -> list[tuple[int, Optimizer, Group]]:
        """The groups that a name means; `UnsupportedError` if there is none."""
        base, number = split(name)
        key = "lr" if base == "lr_factor" else base
        groups = [(k, optimizer, group) for k, (optimizer, group) in enumerate(self.rates.groups())]
        if number is not None and number >= len(groups):
            raise UnsupportedError(f"{name}: there are groups 0 to {len(groups) - 1}")
        named = [one for one in groups if _tunable(one[2], key) and number in (None, one[0])]
        if not named and any(ASKED in group for _, _, group in groups):
            raise UnsupportedError(
                f"{name}: the program makes its own steps, and has not asked for {key}; let it use "
                f"run.tuned({key!r}, default) in each step. {self._can().capitalize()}"
            )
        if not named:
            kinds = ", ".join(dict.fromkeys(type(optimizer).__name__ for _, optimizer, _ in groups))
            raise UnsupportedError(f"{name}: {kinds} has no {key}; {self._can()}")
        return named

    def _check_group(self, name: str, value: Any, number: int, optimizer: Optimizer, group: Group) -> None:
        base, _ = split(name)
        if base == "lr" and SCHEDULED in group and float(group["lr"]) == 0:
            raise UnsupportedError(
                f"{name}: the scheduler of group {number} has set the rate to 0, of which {value:g} is no multiple; "
                "use lr_factor, or try again when the rate is above 0"
            )
        if base == "momentum" and bool(value) != bool(group["momentum"]) and isinstance(optimizer, SGD):
            raise UnsupportedError(
                f"{name}: SGD with momentum {group['momentum']!r} cannot change to {value!r}, because its state, and "
                "what is exchanged, was settled at attach; use a momentum above 0 in both, or attach again"
            )
        if base == "betas" and self.rule.payload.moments_after is not None:
            raise UnsupportedError(f"{name}: {self.rule.name} exchanges Adam's moment, whose betas are settled")

    def _can(self) -> str:
        groups = self.rates.groups()
        known = ("lr", "momentum", "betas", "weight_decay", "eps")
        names = [key for key in known if any(_tunable(group, key) for _, group in groups)]
        every = [*(["lr_factor"] if "lr" in names else []), *names, *self._of_rule()]
        return f"what can be tuned is {', '.join(every) or 'nothing'}"

    def _of_rule(self) -> list[str]:
        period = ["period"] if self.rule.payload.spans_block else []
        steps = all(hasattr(self.rule.outer, field) for field in OUTER)
        return [*period, *(("gain", "outer_momentum", "outer_lr") if steps else ())]

    def _rule_with(self, changes: Changes) -> Rule:
        """The rule with other numbers; `RuleError` if it cannot have them."""
        rule = self.rule
        for name in changes:
            if name not in (*self._of_rule(), OVERLAP):
                raise UnsupportedError(f"{name}: {rule.text()} has no such setting; {self._can()}")
        schedule: Any = rule.schedule
        outer: Any = rule.outer
        of_schedule = {name: changes[name] for name in ("period", OVERLAP) if name in changes}
        of_outer = {name.removeprefix("outer_"): changes[name] for name in changes if name not in of_schedule}
        if len(of_outer) == 3:
            raise RuleError("gain, outer_momentum and outer_lr cannot all change: two of them give the third")
        if of_outer:
            stays = "gain" not in of_outer  # the other number does; else the gain gives it
            others = {name: self._shown(f"outer_{name}") if stays else None for name in ("momentum", "lr")}
            outer = replace(outer, **{**others, **of_outer})
            outer.momentum_at(1 << 30, self.workers)  # raises if the gain does not fit the rate
        if OVERLAP in changes:
            rule = replace(rule, name=RecipeCall(rule.name, {**rule.arguments, **changes}))
        if of_schedule:
            schedule = replace(schedule, **of_schedule)
        return replace(rule, schedule=schedule, outer=outer) if changes else rule

    # -- applying ---------------------------------------------------------------------------------

    def apply(self, changes: Changes) -> None:
        """Make changes that passed `check`."""
        of_rule = {name: value for name, value in changes.items() if name in (*OF_RULES, OVERLAP)}
        self.rule = self._rule_with(of_rule)
        for name in sorted(changes.keys() - of_rule.keys(), key=lambda name: ("@" in name, name)):  # one group's last
            base, value = split(name)[0], changes[name]
            for number, _, group in self._groups(name):
                if base == "lr_factor":
                    self.rates.scale(number, self.rates.factor(number) * value)
                elif base == "lr" and SCHEDULED in group:
                    self.rates.scale(number, value / float(group["lr"]))
                elif base == "lr":
                    self.rates.scale(number, 1.0)
                    write_rate(group, value)
                else:
                    group[base] = tuple(value) if base == "betas" else value

    # -- showing and undoing ----------------------------------------------------------------------

    def show(self, names: Changes | list[str]) -> dict[str, Any]:
        """Present values: one if all groups have the same, else a list; rates include their factors."""
        shown: dict[str, Any] = {}
        for name in names:
            if name in (*OF_RULES, OVERLAP):
                shown[name] = self._shown(name)
                continue
            base, _ = split(name)
            values = [self._value(base, number, group) for number, _, group in self._groups(name)]
            shown[name.replace("lr_factor", "lr")] = values[0] if all(v == values[0] for v in values) else values
        return shown

    def numbers(self) -> dict[str, float]:
        """Present numbers by name, `lr/1` for that of group 1 if groups differ; without tensors on a device."""
        numbers: dict[str, float] = {}
        for name in ("lr", "momentum", "weight_decay"):
            own = {
                k: float(self._value(name, k, group)) * (self.rates.of_workers(optimizer) if name == "lr" else 1.0)
                for k, (optimizer, group) in enumerate(self.rates.groups())
                if _tunable(group, name) and not (isinstance(group[name], Tensor) and group[name].device.type != "cpu")
            }
            same = len(set(own.values())) == 1
            numbers |= {name: next(iter(own.values()))} if same else {f"{name}/{k}": value for k, value in own.items()}
        return numbers | {name: float(self._shown(name)) for name in self._of_rule()}

    def _shown(self, base: str) -> Any:
        outer: Any = self.rule.outer
        if base in ("period", OVERLAP):
            return getattr(self.rule.schedule, base)
        momentum, rate = outer.momentum_at(1 << 30, self.workers), outer.lr_at(1 << 30, self.workers)
        return {"outer_momentum": momentum, "outer_lr": rate, "gain": rate / (1 - momentum)}[base]

    def _value(self, base: str, number: int, group: Group) -> Any:
        if base in ("lr", "lr_factor"):
            return float(group["lr"]) * self.rates.factor(number)
        return list(group[base]) if base == "betas" else group[base]

    def snapshot(self, changes: Changes) -> dict[str, Any]:
        """What `restore` needs to undo the changes, as JSON values."""
        rule = self._rule_state() if changes.keys() & set(OF_RULES) else None
        snapshot: dict[str, Any] = {"rule": rule, "groups": []}
        if rule is not None and "period" not in changes:
            rule["period"] = None  # the period controller may change it meanwhile
        for name in changes.keys() - set(OF_RULES):
            base, _ = split(name)
            for number, _, group in self._groups(name):
                if base in ("lr", "lr_factor"):
                    rate = None if SCHEDULED in group or base == "lr_factor" else float(group["lr"])
                    snapshot["groups"].append([number, "lr", [rate, self.rates.factor(number)]])
                else:
                    snapshot["groups"].append([number, base, self._value(base, number, group)])
        return snapshot

    def restore(self, snapshot: dict[str, Any]) -> None:
        if snapshot["rule"] is not None:
            self._load_rule(snapshot["rule"])
        groups = self.rates.groups()
        for number, base, value in snapshot["groups"]:
            group = groups[number][1]
            if base != "lr":
                group[base] = tuple(value) if base == "betas" else value
                continue
            self.rates.scale(number, value[1])
            if value[0] is not None:
                write_rate(group, value[0])

    def names_in(self, snapshot: dict[str, Any]) -> list[str]:
        """The names of the settings in a snapshot."""
        names = [f"{base}@{number}" for number, base, _ in snapshot["groups"]]
        return names + (self._of_rule() if snapshot["rule"] is not None else [])

    def _rule_state(self) -> dict[str, Any]:
        outer = {field: getattr(self.rule.outer, field) for field in OUTER if "gain" in self._of_rule()}
        schedule = self.rule.schedule
        shown = {"period": schedule.period, "outer": outer}
        return shown | ({OVERLAP: schedule.overlap} if schedule.follows_times else {})

    def _load_rule(self, saved: dict[str, Any]) -> None:
        schedule: Any = self.rule.schedule
        outer: Any = self.rule.outer
        if "period" in self._of_rule() and saved["period"] is not None:
            now = schedule.overlap
            moved = {} if saved.get(OVERLAP, now) == now else {OVERLAP: saved[OVERLAP]}
            schedule = replace(schedule, period=saved["period"], **moved)
        self.rule = replace(self.rule, schedule=schedule, outer=replace(outer, **saved["outer"]))

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, besides the optimizers' own."""
        factors = [[number, factor] for number, factor in sorted(self.rates.factors.items())]
        return {"rule": self._rule_state(), "factors": factors}

    def load(self, state: dict[str, Any]) -> None:
        if state["rule"] is not None:
            self._load_rule(state["rule"])
        self.rates.factors = {int(number): float(factor) for number, factor in state["factors"]}


def _tunable(group: Group, key: str) -> bool:
    """Whether the group has the setting, and the program reads it."""
    return key in group and key in group.get(ASKED, (key,))
