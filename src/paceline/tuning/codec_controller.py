# SPDX-License-Identifier: Apache-2.0
"""Chooses the codec of blocks along with their period, where no probe can: in the elastic runs of `auto`.

At the looks of :mod:`.period_controller`, and soon after the membership changed, all workers know e and c under the
present codec k. Under another codec j an exchange is taken for what it took under j among the present workers, or

    e_j = e_k bytes_j / bytes_k,    but no less than under a codec of fewer bytes

A codec whose exchanges take more than 1 / 1.25 of the time of the row before is left out: where messages are short,
bytes do not count. The next look is soon, since that time was computed: on a link of a long delay it is longer, and
takes a longer period. Of the others it is that of the first row of :data:`paceline.rules.choice.LADDER` whose periods
suffice without overlap. The present one stays where it lies between the codecs that come out with exchanges a quarter
shorter and a quarter longer: so noise does not change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.rules.choice import MARGIN, codec_for
from paceline.rules.schedule import Paced
from paceline.tuning.names import Changes
from paceline.tuning.period_controller import FIRST, PeriodController, reason
from paceline.tuning.timers import Timer


class CodecController(PeriodController):
    """One worker's measurements, and the agreement on a codec and a period.

    Args:
        timer: measures.
        bytes_of: codec -> what a worker sends for a block, in the order of the ladder.

    Attributes:
        codec: at present.
    """

    def __init__(self, timer: Timer, bytes_of: Mapping[str, int]) -> None:
        super().__init__(timer)
        self._bytes_of = dict(bytes_of)
        self.codec = next(iter(bytes_of))
        self._seen: dict[str, float] = {}

    def agree(self, rows: Sequence[Any], schedule: Paced, blocks: int) -> tuple[Changes, str] | None:
        found = self._together(rows)
        if found is None:
            return None
        exchange_s, step_s = found
        self._seen[self.codec] = exchange_s
        block_s = self._times()
        before, self.codec = self.codec, codec_for(block_s, step_s, schedule, self.codec)
        if self.codec == before:
            return self._follow(exchange_s, step_s, schedule, blocks)
        period = schedule.period_for(block_s[self.codec], step_s)
        self._looked(blocks, FIRST)
        return {"codec": self.codec, "period": period}, reason(schedule, schedule.period, exchange_s, step_s)

    def _times(self) -> dict[str, float]:
        """codec -> e, of those that win time."""
        byte_s, least, found = self._seen[self.codec] / max(1, self._bytes_of[self.codec]), 0.0, {}
        for codec in reversed(self._bytes_of):
            found[codec] = self._seen.get(codec, max(least, self._bytes_of[codec] * byte_s))
            least = max(least, found[codec])
        kept: dict[str, float] = {}
        for codec in self._bytes_of:
            if not kept or found[codec] * MARGIN <= min(kept.values()):
                kept[codec] = found[codec]
        return kept

    def renew(self) -> None:
        self._seen = {}
        super().renew()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "codec": self.codec, "seen": self._seen}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.codec, self._seen = state.get("codec", self.codec), dict(state.get("seen", {}))
