# SPDX-License-Identifier: Apache-2.0
"""A member that lies: it speaks the protocol, trains as the others do, and now and then says what is not so.

It may be put out for that, and then it ends. Whatever it says, the samples that were leased to other members have to
enter the model once, and these must come to the end of the run. Of those leased to itself it can say that it trained
them when it did not, or, after a restart of the control plane, that it holds what it had given back.
"""

from __future__ import annotations

from collections.abc import Callable

from devtools.storm.member import Job, Member

from paceline.data.ledger.epoch_ledger import ENDLESS
from paceline.errors import PacelineError
from paceline.flow.control import wire


class Liar(Member):
    """A member that lies before some of its exchanges."""

    def _exchange(self) -> None:
        rng, own = self.job.world.rng, self.job.truth.of_liars
        own |= {(epoch, place) for _, epoch, begin, end in self.held for place in range(begin, end)}
        if rng.random() < 0.6:
            LIES[rng.choice(sorted(LIES))](self)
        super()._exchange()

    def say(self, kind: int, *numbers: int, note: object = None) -> None:
        """Send a frame of a serial number that is not used yet, once."""
        self.client._connection.send(kind, (self.client._next(), *numbers), note)

    def commit(
        self, marks: object = (), returned: object = (), facts: object = None, ahead: int = 1, wanted: int = 0
    ) -> None:
        """Commit the next exchange, or another one."""
        note = {"marks": marks, "returned": returned, "facts": facts or {}, "wanted": wanted}
        generation = self.generation
        self.say(wire.COMMIT, generation.number, generation.exchange + ahead, note=note)

    @property
    def mine(self) -> list[list[int]]:
        """What it holds."""
        return [list(mark) for mark in self.held]

    @property
    def all(self) -> list[list[int]]:
        """Everything there is."""
        return [[0, epoch, 0, self.job.samples] for epoch in range(self.job.epochs)]


LIES: dict[str, Callable[[Liar], None]] = {
    "marks of others": lambda one: one.commit(one.all),
    "returns what others hold": lambda one: one.commit(one.mine, one.all),
    "marks twice": lambda one: one.commit([[0, 0, 0, 2], [0, 0, 1, 3]]),
    "marks and returns": lambda one: one.commit([*one.mine, [0, 0, 0, 1]], [*one.mine, [0, 0, 0, 1]]),
    "negative marks": lambda one: one.commit([[0, 0, -4, 2]]),
    "marks backwards": lambda one: one.commit([[0, 0, 4, 2]]),
    "marks without end": lambda one: one.commit([[0, 1 << 39, 0, ENDLESS]]),
    "marks that are none": lambda one: one.commit({"0": float("nan")}),
    "facts of NaN": lambda one: one.commit(one.mine, facts={"effective": float("nan")}),
    "wants a thousand": lambda one: one.commit(one.mine, wanted=1000),
    "an exchange ahead": lambda one: one.commit(one.mine, ahead=7),
    "the last exchange again": lambda one: one.commit(one.mine, ahead=0),
    "starts far ahead": lambda one: one.client._connection.send(wire.STARTS, (one.generation.exchange + 9,)),
    "holds nonsense": lambda one: one.client._connection.send(wire.HOLDS, (-1, -1, -1)),
    "fails the future": lambda one: one.say(wire.FAILED, one.generation.number + 5, note={"why": "", "suspects": []}),
    "fails with nobody": lambda one: one.say(wire.FAILED, one.generation.number, note={"why": "", "suspects": "all"}),
    "an epoch that ends early": lambda one: one.say(wire.TELL, note=["ends", 0, 0, 1]),
    "done with what others hold": lambda one: one.say(wire.TELL, note=["done", one.all]),
    "leaves what others hold": lambda one: one.say(wire.TELL, note=["left", 0, 1 << 30, one.all]),
    "asks for other data": lambda one: one.say(wire.ASK, 0, 0, one.job.samples + 5, 1, 3, 1),
    "asks for nothing": lambda one: one.say(wire.ASK, -1, -1, -1, 0, 0, 9),
    "a kind that is none": lambda one: one.say(200),
}
"""By name, what it may say."""


def lying_program(job: Job, done: Callable[[BaseException | None], None]) -> Callable[[], None]:
    """The program of a liar's process; `done` gets why it ended."""

    def main() -> None:
        try:
            Liar(job).run()
        except PacelineError as error:
            done(error)
            raise
        done(None)

    return main
