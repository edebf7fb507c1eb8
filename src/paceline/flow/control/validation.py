# SPDX-License-Identifier: Apache-2.0
"""Checks everything that comes over the wire, value by value; invalid values raise MismatchError."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from paceline.data.ledger.epoch_ledger import ENDLESS, Mark, Question
from paceline.errors import MismatchError

WORKERS = 1 << 31
"""Upper bound of workers' numbers."""
HUGE = 1 << 53
"""Upper bound of the numbers of exchanges and generations."""
REASON = 2000
"""Characters of a reason, at most."""
LOADERS = 1 << 10
EPOCHS = 1 << 40
MANY = 1 << 14
"""Entries of a list, at most."""
ADDRESS = re.compile(r"[0-9A-Za-z._:%-]{1,255}")


def whole(value: Any, low: int, high: int, what: str) -> int:
    """A whole number of low .. high (incl.); True and 1.0 are refused."""
    if type(value) is not int or not low <= value <= high:
        raise MismatchError(f"{what} is a whole number of {low} to {high}, got {_short(value)}")
    return value


def text(value: Any, most: int, what: str) -> str:
    """Text of at most `most` characters; unprintable ones become spaces."""
    if not isinstance(value, str) or len(value) > most:
        raise MismatchError(f"{what} is text of at most {most} characters, got {_short(value)}")
    return "".join(one if one.isprintable() else " " for one in value)


def address(value: Any) -> str:
    """An address or the name of a host."""
    if not isinstance(value, str) or not ADDRESS.fullmatch(value):
        raise MismatchError(f"an address is one of a host, got {_short(value)}")
    return value


def table(value: Any, what: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise MismatchError(f"{what} is a JSON object, got {_short(value)}")
    return value


def small(value: Any, most: int, what: str) -> dict[str, Any]:
    """A JSON object of at most `most` bytes."""
    said = table(value, what)
    try:
        size = len(json.dumps(said, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise MismatchError(f"{what} is JSON without NaN and infinity: {error}") from error
    if size > most:
        raise MismatchError(f"{what} has at most {most} bytes as JSON, got {size}")
    return said


def rows(value: Any, what: str) -> list[Any]:
    """A list of at most `MANY` entries."""
    if not isinstance(value, list) or len(value) > MANY:
        raise MismatchError(f"{what} are a list of at most {MANY}, got {_short(value)}")
    return value


def row(value: Any, length: int, what: str) -> list[Any]:
    """A list of `length` entries."""
    if not isinstance(value, list) or len(value) != length:
        raise MismatchError(f"{what} has {length} entries, got {_short(value)}")
    return value


def workers(value: Any) -> list[int]:
    """Numbers of workers."""
    return [whole(one, 0, WORKERS, "a worker's number") for one in rows(value, "workers")]


def marks(value: Any) -> list[Mark]:
    """Marks: (loader, epoch, begin, end)."""
    return [_mark(one) for one in rows(value, "marks")]


def _mark(value: Any) -> Mark:
    loader, epoch, *places = row(value, 4, "a mark")
    begin, end = span(places)
    return number(loader), stage(epoch), begin, end


def span(value: Any) -> tuple[int, int]:
    """begin .. end of places."""
    begin, end = row(value, 2, "a range")
    low = whole(begin, 0, ENDLESS, "a place")
    return low, whole(end, low, ENDLESS, "the end of a range")


def number(value: Any) -> int:
    """The number of a loader."""
    return whole(value, 0, LOADERS, "a loader's number")


def stage(value: Any) -> int:
    """An epoch."""
    return whole(value, 0, EPOCHS, "an epoch")


def question(numbers: Sequence[int]) -> Question:
    """A question for work: loader, epoch, total, unit, most, dry."""
    loader, epoch, total, unit, most, dry = numbers
    return Question(
        number(loader),
        stage(epoch),
        whole(total, 0, ENDLESS, "places of an epoch"),
        whole(unit, 1, ENDLESS, "the unit of a lease"),
        whole(most, 1, ENDLESS, "units of a lease"),
        bool(whole(dry, 0, 1, "dry")),
    )


def _short(value: Any) -> str:
    said = repr(value) if not isinstance(value, (list, dict, str)) or len(value) < 50 else f"{type(value).__name__}"
    return said if len(said) <= 80 else f"{said[:80]}..."
