# SPDX-License-Identifier: Apache-2.0
"""The events of a worker's log, as dataclasses, and how JSON becomes one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, TypeVar

from paceline.observe.printable import deeply

Kind = TypeVar("Kind")

LONGEST_LINE = 1 << 22
"""Bytes of a line of a log; a longer one is no event."""


@dataclass(frozen=True)
class EpochEvent:
    """A worker began a pass over its share of the data."""

    at_s: float
    epoch: int = 0
    batches: int | None = None  # minibatches of this worker in this pass


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """One or several exchanges of a worker, and the work since the line before."""

    at_s: float
    block: int = 0
    exchanges: int = 1
    minibatches: int = 0
    total_minibatches: int = 0
    samples: int | None = None
    total_samples: int | None = None
    compute_s: float = 0.0
    wait_s: float = 0.0
    exchange_s: float = 0.0
    bytes: int = 0
    left_out: tuple[int, ...] = ()  # ranks whose contribution was not finite, or far larger than usual
    warmup: bool = False
    delays: dict[int, int] = field(default_factory=dict)  # delay of a push, in updates -> how many had it
    refused: int = 0  # pushes that were not finite
    data_s: float | None = None  # waiting for batches; None in logs that count it as computing
    met: int | None = None  # number of an exchange of the line, the same on all workers
    met_s: float | None = None  # when the worker knew that all had reached it, in seconds as `at_s`
    effective_workers: float | None = None  # how many workers all are worth; None where exchanges do not tell
    generation: int = 0  # of an elastic run; exchanges are counted from 0 in each

    @property
    def measured_s(self) -> float:
        """Seconds that the line accounts for."""
        return self.compute_s + self.wait_s + self.exchange_s + (self.data_s or 0.0)


@dataclass(frozen=True)
class Lost:
    """A worker was lost."""

    at_s: float
    rank: int
    why: str = ""
    taken_over: tuple[int, ...] = ()  # ranks that own its shards from then on


@dataclass(frozen=True)
class LeftOut:
    """A worker's contribution was rejected."""

    at_s: float
    rank: int
    why: str = ""
    finite: bool = False  # finite, but too large
    in_a_row: int = 1  # rejections of that worker since its last accepted contribution


@dataclass(frozen=True)
class Takeover:
    """The worker that wrote this owns the shards of another worker from then on."""

    at_s: float
    slice_of: int
    version: int = 0  # of the values from which it continues, in updates
    source: str = "unknown"  # "replica"; of older runs also "last pulled values"


@dataclass(frozen=True)
class Tuned:
    """Settings were changed, or a request to change them was refused."""

    at_s: float
    by: int = 0  # the rank that asked
    block: int = 0
    total_minibatches: int = 0
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # name -> before, after
    revert: bool = False
    refused: str = ""
    why: str = ""  # the measurements of all workers, where they caused it


@dataclass(frozen=True)
class GenerationEvent:
    """A worker of an elastic run became a member of a generation."""

    at_s: float
    number: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Value:
    """A number that the user's program reported."""

    at_s: float
    name: str
    value: float  # the log writes nan and inf as text, which float() reads
    total_minibatches: int = 0
    total_samples: int | None = None


_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "float": float,
    "int": int,
    "str": str,
    "dict[int, int]": lambda counts: {int(key): int(count) for key, count in counts.items()},
    "tuple[int, ...]": lambda numbers: tuple(int(number) for number in numbers),
}


@lru_cache
def _converters(kind: Any) -> dict[str, Callable[[Any], Any]]:
    types = {one.name: str(one.type).removesuffix(" | None") for one in fields(kind)}
    return {name: _CONVERTERS[text] for name, text in types.items() if text in _CONVERTERS}


def from_json(kind: type[Kind], row: Mapping[str, Any], **given: Any) -> Kind:
    """A dataclass of this module from JSON: unknown names are ignored, missing ones and null take the default.

    Raises:
        TypeError, ValueError, AttributeError: a field without a default is missing, or a value has another type.
    """
    fields_of_event = {
        name: convert(row[name])
        for name, convert in _converters(kind).items()  # type: ignore[arg-type]
        if name not in given and row.get(name) is not None
    }
    return kind(**fields_of_event, **given)


def parse_line(line: bytes) -> dict[str, Any]:
    """The event on one line; ValueError or RecursionError where there is none."""
    event = json.loads(line)
    if not isinstance(event, dict):
        raise ValueError(f"expected an object, got {type(event).__name__}")
    return event if line.isascii() and b"\\" not in line else dict(deeply(event))


def parse_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The events on some lines; other lines are skipped."""
    for line in lines:
        try:
            event = parse_line(line)
        except (ValueError, RecursionError):
            continue
        yield event
