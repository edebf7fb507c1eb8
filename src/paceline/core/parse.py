# SPDX-License-Identifier: Apache-2.0
"""Parses rules and codecs written as literal calls, of which nothing is evaluated, and checks their settings."""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeGuard

from paceline.errors import RuleError


def read_call(text: str, what: str, example: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of `name`, `name()` or `name(setting=1, other="word")`; `what` and an `example` of it,
    such as "rule", are for messages."""
    unreadable = f"cannot read the {what} {text!r}; write it like {example}"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RuleError(unreadable) from error
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise RuleError(unreadable)
    unnamed = [*tree.args, *(keyword.value for keyword in tree.keywords if keyword.arg is None)]
    if unnamed:
        shown = ", ".join(ast.unparse(one) for one in unnamed)
        raise RuleError(
            f"the settings of {text!r} need names, like {example}; name the setting that {shown} is for, or "
            "leave it out"
        )
    settings: dict[str, Any] = {}
    for keyword in tree.keywords:
        try:
            settings[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise RuleError(
                f"the value of {keyword.arg} in {text!r} is not a plain number, word in quotes, True, False or None"
            ) from error
    return tree.func.id, settings


def like(word: str, words: list[str]) -> str:
    """A suggestion of the closest word, for messages; "" if none is close."""
    close = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite number, not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check(fits: bool, name: str, wanted: str, value: object, more: str = "") -> None:
    """Raise `RuleError` unless the value of setting `name` fits; `more` follows in the message."""
    if not fits:
        raise RuleError(f"{name} must be {wanted}, got {value!r}{more}")


def check_whole(name: str, value: object, least: int, of: str = "", most: float = math.inf, shown: str = "") -> None:
    """Raise `RuleError` unless it is a whole number in these bounds; `of`: what it counts, such as "of steps"."""
    bounds = f", at least {least}" if most == math.inf else f" from {least} to {shown or most}"
    check(is_whole(value) and least <= value <= most, name, f"a whole number{of and f' {of}'}{bounds}", value)


def check_number(name: str, value: object, low: float, high: float, to: bool = False) -> None:
    """Raise `RuleError` unless it is a number from `low` to below `high`, or up `to` it."""
    inside = is_number(value) and low <= value <= high and (to or value < high)
    check(inside, name, f"a number from {low:g} to {'' if to else 'below '}{high:g}", value)


def check_bool(name: str, value: object) -> None:
    """Raise `RuleError` unless it is True or False."""
    check(isinstance(value, bool), name, "True or False", value)


Check = Callable[[Any, str], None]  # raises `RuleError` unless the setting of this name fits an object


class Checked:
    """A dataclass whose settings are checked when it is made."""

    checks: ClassVar[Mapping[str, Check]] = {}

    def __post_init__(self) -> None:
        for name, one in self.checks.items():
            one(self, name)


def whole(least: int, of: str = "", most: float | str = math.inf) -> Check:
    """The check of a whole number in these bounds, as `check_whole`; `most` may name another setting."""

    def check_setting(part: Any, name: str) -> None:
        highest, shown = (getattr(part, most), f"the {most} ") if isinstance(most, str) else (most, "")
        check_whole(name, getattr(part, name), least, of, highest, shown and f"{shown}({highest})")

    return check_setting


def fits(test: Callable[[Any], bool], wanted: str, more: str = "") -> Check:
    """The check of a value that passes a test."""
    return lambda part, name: check(test(getattr(part, name)), name, wanted, getattr(part, name), more)
