# SPDX-License-Identifier: Apache-2.0
"""The space of a search: settings and their values, such as `lr=log(1e-4,1e-1)`.

=================  ============================  ==============================================
log(a,b)           any number from a to b        uniform in the logarithm; near: half to double
uniform(a,b)       any number from a to b        near: a tenth of the range to either side
int(a,b)           whole numbers from a to b     near: a tenth of the range, at least 1
choice(x,y,..)     one of these, as words or     near: the one before or after it, if all are
                   numbers, tuples as well       numbers, else any
=================  ============================  ==============================================
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from paceline.core.parse import is_number
from paceline.errors import RuleError
from paceline.tuning.names import checked, split

EXAMPLES = "write NAME=log(1e-4,1e-1), NAME=uniform(0,0.9), NAME=int(2,32) or NAME=choice(4,8,16)"
NEAR = 0.1
"""The fraction of a range that counts as near, to either side."""
TIMES = 2.0
"""The factor that counts as near in a logarithmic range."""


class Range(Protocol):
    """The values of one setting."""

    def at(self, part: float) -> Any:
        """The value at a fraction of the range, 0 to below 1."""

    def near(self, value: Any) -> Range:
        """The part of the range around a value."""

    def holds(self, value: Any) -> bool:
        """Whether the range contains a value."""


@dataclass(frozen=True)
class NumberRange:
    """Numbers from `low` to `high`, uniform or, with `log`, uniform in the logarithm."""

    low: float
    high: float
    log: bool = False

    def at(self, part: float) -> float:
        if self.log:
            return self._within(self.low * (self.high / self.low) ** part)
        return self._within(self.low + (self.high - self.low) * part)

    def near(self, value: Any) -> NumberRange:
        wide = (self.high - self.low) * NEAR
        ends = (value / TIMES, value * TIMES) if self.log else (value - wide, value + wide)
        return replace(self, low=self._within(ends[0]), high=self._within(ends[1]))

    def holds(self, value: Any) -> bool:
        return is_number(value) and bool(self.low <= value <= self.high)

    def _within(self, value: float) -> float:
        return min(self.high, max(self.low, value))


@dataclass(frozen=True)
class IntRange:
    """Whole numbers from `low` to `high` (incl.)."""

    low: int
    high: int

    def at(self, part: float) -> int:
        return min(self.high, self.low + int((self.high - self.low + 1) * part))

    def near(self, value: Any) -> IntRange:
        wide = max(1, round((self.high - self.low) * NEAR))
        return IntRange(max(self.low, value - wide), min(self.high, value + wide))

    def holds(self, value: Any) -> bool:
        return isinstance(value, int) and self.low <= value <= self.high


@dataclass(frozen=True)
class Choice:
    """Some values; numbers in ascending order."""

    values: tuple[Any, ...]

    @property
    def ordered(self) -> bool:
        """Whether all are numbers, so that values have neighbours."""
        return all(is_number(one) for one in self.values)

    def at(self, part: float) -> Any:
        return self.values[min(len(self.values) - 1, int(len(self.values) * part))]

    def near(self, value: Any) -> Choice:
        if not self.ordered:
            return self
        place = self.values.index(value)
        return Choice(self.values[max(0, place - 1) : place + 2])

    def holds(self, value: Any) -> bool:
        return value in self.values


Space = dict[str, Range]
"""Setting -> its values."""


def space(texts: Sequence[str]) -> Space:
    """Parse texts such as `lr=log(1e-4,1e-1)`; `RuleError` with an example if one is invalid."""
    found: Space = {}
    for text in texts:
        name, values = _one(text)
        if name in found:
            raise RuleError(f"{name} is searched twice; name each setting once")
        found[name] = values
    for name in found:
        base, at, group = name.partition("@")
        if base == "lr" and (f"lr_factor{at}{group}" in found):
            raise RuleError(f"{name} and lr_factor{at}{group} cannot both change; search one of them")
    if not found:
        raise RuleError(f"nothing to search; {EXAMPLES}")
    return found


def _one(text: str) -> tuple[str, Range]:
    match = re.fullmatch(r"\s*([^=\s]+)\s*=\s*(\w+)\s*\((.*)\)\s*", text)
    if not match:
        raise RuleError(f"{text!r} says no setting and values; {EXAMPLES}")
    name, kind, inside = match[1], match[2], match[3]
    split(name)  # raises if there is no such setting
    if kind not in ("log", "uniform", "int", "choice"):
        raise RuleError(f"{text!r}: there is no {kind}(..); {EXAMPLES}")
    values = _values(inside)
    found = _choice(text, values) if kind == "choice" else _between(text, kind, values)
    for value in found.values if isinstance(found, Choice) else (found.at(0.0), found.at(1.0)):
        try:
            checked(name, value)
        except RuleError as error:
            raise RuleError(f"{text!r}: {error}") from error
    return name, found


def _choice(text: str, values: tuple[Any, ...]) -> Choice:
    if len(values) < 2 or len({repr(value) for value in values}) < len(values):
        raise RuleError(f"{text!r}: a choice needs at least two values, all different; {EXAMPLES}")
    found = Choice(values)
    return Choice(tuple(sorted(values))) if found.ordered else found


def _between(text: str, kind: str, values: tuple[Any, ...]) -> Range:
    if len(values) != 2 or not all(is_number(one) for one in values) or not values[0] < values[1]:
        raise RuleError(f"{text!r}: {kind}(a,b) needs two numbers, the smaller one first; {EXAMPLES}")
    if kind == "int":
        if not all(isinstance(one, int) for one in values):
            raise RuleError(f"{text!r}: int(a,b) needs whole numbers; {EXAMPLES}")
        return IntRange(*values)
    if kind == "log" and not values[0] > 0:
        raise RuleError(f"{text!r}: log(a,b) needs numbers above 0; {EXAMPLES}")
    return NumberRange(float(values[0]), float(values[1]), kind == "log")


def _values(inside: str) -> tuple[Any, ...]:
    """Python literals, never evaluated; anything else is a word."""
    try:
        found = ast.literal_eval(f"({inside},)")
        return tuple(list(one) if isinstance(one, tuple) else one for one in found)  # as JSON has them
    except (ValueError, SyntaxError):
        return tuple(_literal(word.strip()) for word in inside.split(","))


def _literal(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
