# SPDX-License-Identifier: Apache-2.0
"""A simulated clock for virtual workers: the duration of computing and of messages, and the order of events.

Events are the end of a worker's computing and the arrival of a message. They happen in the order of simulated time; at
equal times messages come before workers, and lower ranks before higher ones. Durations are drawn from the seed, the
worker and the number of the step alone, so the same seed gives the same bits in any order of execution.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.rng import mix

Compute = Callable[[int, int, random.Random], float]
Network = Callable[[int, int, int, random.Random], float]
_MESSAGE, _WORKER = 0, 1


def exponential(mean_s: float = 1.0) -> Compute:
    """Memoryless computing times: the order of pushes is random, and delays are geometric."""
    return lambda rank, step, generator: generator.expovariate(1.0 / mean_s)


def uniform(low_s: float = 0.5, high_s: float = 1.5) -> Compute:
    """Computing times between two bounds."""
    return lambda rank, step, generator: generator.uniform(low_s, high_s)


def link(latency_s: float = 0.0, bytes_per_s: float = float("inf")) -> Network:
    """A network in which a message takes the latency plus its bytes at the rate, without queues."""
    return lambda source, to, nbytes, generator: latency_s + nbytes / bytes_per_s


@dataclass
class Clock:
    """The simulated time of a virtual cluster.

    >>> import torch, paceline
    >>> def train() -> int:
    ...     model = torch.nn.Linear(1, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     with paceline.attach(model, optimizer, "asgd") as run:
    ...         for inputs in run.share([torch.ones(2, 1)] * 30):
    ...             model(inputs).sum().backward()
    ...             optimizer.step()
    ...     return run.minibatches
    >>> paceline.simulate(train, 3, clock=paceline.Clock(compute=[1.0, 1.0, 5.0]))  # the third worker is slow
    [14, 13, 3]

    Attributes:
        compute: seconds of a minibatch: one number for all, one for each worker, or a function of (rank, number of the
            step, generator).
        network: seconds of a message between two workers: a number, or a function of (source, to, bytes, generator).
        seed: of the random durations.
        now: simulated seconds so far; after a run, its duration.
    """

    compute: float | Sequence[float] | Compute = 1.0
    network: float | Network = 0.0
    seed: int = 0
    now: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start at 0 again; a cluster calls it, so that a clock used twice gives the same durations."""
        self.now = 0.0
        self._events: list[tuple[float, int, int, int, Callable[[], None]]] = []
        self._number = 0
        self._messages: Counter[tuple[int, int]] = Counter()
        self._arrivals: dict[tuple[int, int], float] = {}

    def compute_s(self, rank: int, step: int) -> float:
        """Seconds that worker `rank` takes for its minibatch `step`."""
        if callable(self.compute):
            seconds = self.compute(rank, step, random.Random(mix(self.seed, 1, rank, step)))
        elif isinstance(self.compute, Sequence):
            seconds = self.compute[rank % len(self.compute)]
        else:
            seconds = self.compute
        return _duration(seconds, f"minibatch {step} of worker {rank}")

    def message_s(self, source: int, to: int, nbytes: int, number: int) -> float:
        """Seconds that message `number` from `source` to `to` takes; it is not counted."""
        if not callable(self.network):
            return _duration(self.network, "a message")
        generator = random.Random(mix(self.seed, 2, source, to, number))
        return _duration(self.network(source, to, nbytes, generator), f"a message from {source} to {to}")

    def wake(self, rank: int, after_s: float, then: Callable[[], None]) -> None:
        """Call `then`, for worker `rank`, after so many seconds."""
        self._put(self.now + after_s, _WORKER, rank, then)

    def carry(self, source: int, to: int, nbytes: int, then: Callable[[], None]) -> None:
        """Call `then` when a message from `source` arrives at `to`; messages between two workers keep their order."""
        seconds = 0.0  # within a worker
        if source != to:
            self._messages[source, to] += 1
            seconds = self.message_s(source, to, nbytes, self._messages[source, to])
        arrives = max(self.now + seconds, self._arrivals.get((source, to), 0.0))
        self._arrivals[source, to] = arrives
        self._put(arrives, _MESSAGE, source, then)

    def _put(self, at_s: float, kind: int, rank: int, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, kind, rank, self._number, then))

    def step(self) -> bool:
        """Carry out the next event; False if there is none."""
        if not self._events:
            return False
        self.now, _, _, _, then = heapq.heappop(self._events)
        then()
        return True

    def state(self) -> dict[str, object]:
        """For a checkpoint, between two events."""
        return {"now": self.now, "messages": [[*pair, count] for pair, count in sorted(self._messages.items())]}

    def load(self, state: dict[str, object]) -> None:
        """The inverse of `state`."""
        self.now = float(state["now"])  # type: ignore[arg-type]
        self._arrivals = {}
        rows: list[list[int]] = state["messages"]  # type: ignore[assignment]
        self._messages = Counter({(source, to): count for source, to, count in rows})


def _duration(seconds: float, what: str) -> float:
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{what} takes {seconds!r} s on the simulated clock; durations are finite and not negative")
    return float(seconds)
