# SPDX-License-Identifier: Apache-2.0
"""The events of a worker's log, as plain objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EpochEvent:
    """A worker began a pass over its share of the data."""

    at_s: float
    epoch: int
    batches: int | None  # minibatches of this worker in this pass


@dataclass(frozen=True, slots=True)
class ExchangeEvent:
    """One or several exchanges of a worker, and the work since the line before."""

    at_s: float
    block: int
    exchanges: int
    minibatches: int
    total_minibatches: int
    samples: int | None
    total_samples: int | None
    compute_s: float
    wait_s: float
    exchange_s: float
    bytes: int
    left_out: tuple[int, ...]  # ranks whose contribution was not finite, or far larger than usual
    warmup: bool
    delays: dict[int, int] = field(default_factory=dict)  # delay of a push, in updates -> how many had it
    refused: int = 0  # pushes that were not finite
    data_s: float | None = None  # waited for batches; None in logs that do not tell it from computing
    met: int | None = None  # number of an exchange of the line, the same on all workers
    met_s: float | None = None  # when the worker knew that all had come to it, in seconds as `at_s`
    generation: int = 0  # of an elastic run; exchanges are counted anew in each

    @property
    def measured_s(self) -> float:
        """Seconds that the line tells of."""
        return self.compute_s + self.wait_s + self.exchange_s + (self.data_s or 0.0)


@dataclass(frozen=True)
class SourceReads:
    """What the caches of a run, or one of them, did with the files of one source."""

    hits: int = 0  # files that were there when they were opened
    misses: int = 0  # files that had to be waited for
    bytes: int = 0  # that came from the source
    waited_s: float = 0.0  # in opening files, in all processes of the loaders together
    retries: int = 0
    corrupt: int = 0  # downloads and files that were found damaged

    @property
    def hit_rate(self) -> float:
        """Share of the files that were there when they were opened."""
        opened = self.hits + self.misses
        return self.hits / opened if opened else 0.0

    def __add__(self, other: SourceReads) -> SourceReads:
        return SourceReads(
            self.hits + other.hits,
            self.misses + other.misses,
            self.bytes + other.bytes,
            self.waited_s + other.waited_s,
            self.retries + other.retries,
            self.corrupt + other.corrupt,
        )


@dataclass(frozen=True)
class Cached:
    """The totals of one cache at one moment."""

    at_s: float
    cache: str  # its name among the caches of the host
    sources: dict[str, SourceReads]


@dataclass(frozen=True)
class Lost:
    """A worker left without a word."""

    at_s: float
    rank: int
    why: str
    taken_over: tuple[int, ...]  # ranks that own its slices from then on


@dataclass(frozen=True)
class LeftOut:
    """A worker's contribution was kept out of the mean."""

    at_s: float
    rank: int
    why: str
    finite: bool  # whether it was only too large
    in_a_row: int  # how often it had happened to that worker without a contribution that counted


@dataclass(frozen=True)
class Takeover:
    """The worker that wrote this owns the slices of another from then on."""

    at_s: float
    slice_of: int
    version: int  # of the values from which it goes on, in updates
    source: str  # "replica" or "last pulled values"


@dataclass(frozen=True)
class Tuned:
    """Settings were changed, or a request to change them was refused."""

    at_s: float
    by: int  # the rank that asked
    block: int
    total_minibatches: int
    changes: dict[str, tuple[Any, Any]]  # name -> before, after
    revert: bool
    refused: str = ""
    why: str = ""  # what all workers have measured, where that changed it


@dataclass(frozen=True)
class GenerationEvent:
    """A worker of an elastic run became a member of a generation."""

    at_s: float
    number: int
    size: int


@dataclass(frozen=True)
class OtherEvent:
    """What else happened to a worker, such as an error, a checkpoint, or a pause."""

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Value:
    """A number that the user's program reported."""

    at_s: float
    name: str
    value: float
    total_minibatches: int
    total_samples: int | None
