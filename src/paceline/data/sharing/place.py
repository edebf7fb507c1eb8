# SPDX-License-Identifier: Apache-2.0
"""Where a worker is in the data that it trains on, as every exchange tells it."""

from __future__ import annotations

from dataclasses import dataclass

INSIDE, ENDED, LEFT = 1, 2, 3
"""A worker is in the middle of a pass, has had all of its batches, or has left it before; the bit 2 says that the pass
is over."""
_STATE_BITS, _BATCH_BITS = 2, 32
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
        return cls(pass_number(packed) - 1, batches, packed & (1 << _STATE_BITS) - 1)

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
    return min(number + 1, _MOST) << _BATCH_BITS + _STATE_BITS | batches << _STATE_BITS | state


def pass_number(packed: int) -> int:
    """The number of a packed place's pass, from 1; 0 without a place."""
    return packed >> _BATCH_BITS + _STATE_BITS
