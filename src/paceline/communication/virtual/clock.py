# SPDX-License-Identifier: Apache-2.0
"""A simulated clock for virtual workers: how long computing and messages take, and what happens in which order.

A worker that computes is woken when its time has come; a message arrives when the network has carried it. Whatever
happens, happens in the order of the simulated time, and at one instant messages come before workers, lower ranks before
higher ones. Durations are drawn from the seed, the worker and the number of the step alone, so the same seed gives the
same bits, whatever the order in which the program ran.
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
    """Computing times without memory: who pushes next is anybody's guess, and delays are geometric."""
    return lambda rank, step, generator: generator.expovariate(1.0 / mean_s)


def uniform(low_s: float = 0.5, high_s: float = 1.5) -> Compute:
    """Computing times between two bounds."""
    return lambda rank, step, generator: generator.uniform(low_s, high_s)


def link(latency_s: float = 0.0, bytes_per_s: float = float("inf")) -> Network:
    """A network in which a message takes the latency and its bytes at the rate; nothing queues."""
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
        seed: of what is drawn.
        now: seconds since the beginning; after a run, when it ended.
        happened: events since the beginning.
    """

    compute: float | Sequence[float] | Compute = 1.0
    network: float | Network = 0.0
    seed: int = 0
    now: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Back to the beginning: a cluster does that, so that a clock which is used again gives the same again."""
        self.now = 0.0
        self._events: list[tuple[float, int, int, int, Callable[[], None]]] = []
        self._number = 0
        self._messages: Counter[tuple[int, int]] = Counter()
        self._arrivals: dict[tuple[int, int], float] = {}
        self.happened = 0

    def compute_s(self, rank: int, step: int) -> float:
        """Seconds that worker `rank` needs for its minibatch number `step`."""
        if callable(self.compute):
            seconds = self.compute(rank, step, random.Random(mix(self.seed, 1, rank, step)))
        elif isinstance(self.compute, Sequence):
            seconds = self.compute[rank % len(self.compute)]
        else:
            seconds = self.compute
        return _duration(seconds, f"minibatch {step} of worker {rank}")

    def network_s(self, source: int, to: int, nbytes: int) -> float:
        """Seconds that the next message from `source` takes to `to`; none within a worker."""
        if source == to:
            return 0.0
        self._messages[source, to] += 1
        return self.message_s(source, to, nbytes, self._messages[source, to])

    def message_s(self, source: int, to: int, nbytes: int, number: int) -> float:
        """Seconds that message `number` from `source` takes to `to`; nothing is counted."""
        if not callable(self.network):
            return _duration(self.network, "a message")
        generator = random.Random(mix(self.seed, 2, source, to, number))
        return _duration(self.network(source, to, nbytes, generator), f"a message from {source} to {to}")

    def wake(self, rank: int, after_s: float, then: Callable[[], None]) -> None:
        """Do `then`, for worker `rank`, in so many seconds."""
        self._put(self.now + after_s, _WORKER, rank, then)

    def carry(self, source: int, to: int, nbytes: int, then: Callable[[], None]) -> None:
        """Do `then` when a message of so many bytes has come from `source` to `to`; those of one pair keep order."""
        arrives = max(self.now + self.network_s(source, to, nbytes), self._arrivals.get((source, to), 0.0))
        self._arrivals[source, to] = arrives
        self._put(arrives, _MESSAGE, source, then)

    def _put(self, at_s: float, kind: int, rank: int, then: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, kind, rank, self._number, then))

    def step(self) -> bool:
        """Let the next thing happen; False where nothing is left to."""
        if not self._events:
            return False
        self.now, _, _, _, then = heapq.heappop(self._events)
        self.happened += 1
        then()
        return True

    def state(self) -> dict[str, object]:
        """What a checkpoint holds, between two events."""
        return {"now": self.now, "messages": [[*pair, count] for pair, count in sorted(self._messages.items())]}

    def load(self, state: dict[str, object]) -> None:
        """Put back what `state` gave."""
        self.now = float(state["now"])  # type: ignore[arg-type]
        self._arrivals = {}
        rows: list[list[int]] = state["messages"]  # type: ignore[assignment]
        self._messages = Counter({(source, to): count for source, to, count in rows})


def _duration(seconds: float, what: str) -> float:
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{what} takes {seconds!r} s on the simulated clock; durations are finite and not negative")
    return float(seconds)
