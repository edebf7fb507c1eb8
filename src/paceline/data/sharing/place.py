# SPDX-License-Identifier: Apache-2.0
"""Where a worker is in the data that it trains on, as every exchange tells it."""

from __future__ import annotations

from dataclasses import dataclass

INSIDE, ENDED, LEFT = 1, 2, 3
"""A worker is in the middle of a pass, has had all of its batches, or has left it before; the bit 2 says that the pass
is over."""
CALLED_WITHIN = (
    "one worker calls all others within a pass, at a step to which those behind do not come in it, since blocks end by "
    "time: call them after passes, or take the rule with even=True, as in auto(even=True)"
)
_STATE_BITS, _BATCH_BITS = 2, 32
PASS_AT_BIT = _STATE_BITS + _BATCH_BITS
"""From this bit on, a packed place is the number of its pass, from 1; 0 without a place."""
_MOST = (1 << 22) - 1


@dataclass(frozen=True, order=True)
class Place:
    """A worker's place; places compare by pass and batches.

    >>> Place.unpack(pack(2, 40, LEFT)).text
    'left pass 3 over its data after 40 batches'
    """

    number: int  # of the pass, from 0
    batches: int  # that it was given of the pass; of a worker whose program is over, the steps that it made
    state: int  # INSIDE, ENDED or LEFT

    @classmethod
    def unpack(cls, packed: int) -> Place:
        """The inverse of `pack`."""
        batches = packed >> _STATE_BITS & (1 << _BATCH_BITS) - 1
        return cls((packed >> PASS_AT_BIT) - 1, batches, packed & (1 << _STATE_BITS) - 1)

    @property
    def text(self) -> str:
        """For messages; follows the worker's name."""
        if self.state == ENDED:
            return f"has ended pass {self.number + 1} over its data"
        doing = "left" if self.state == LEFT else "is in"
        return f"{doing} pass {self.number + 1} over its data after {self.batches} batches"

    @property
    def end(self) -> str:
        """The same of a worker whose program is over."""
        how = "ended" if self.state == ENDED else "left" if self.state == LEFT else "ended within"
        return f"{how} pass {self.number + 1} over its data after {self.batches} steps"


def pack(number: int, batches: int, state: int) -> int:
    """A place as an integer above 0, for the header of an exchange; 0 is a worker without shared data."""
    return min(number + 1, _MOST) << PASS_AT_BIT | batches << _STATE_BITS | state
