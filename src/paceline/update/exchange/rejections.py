# SPDX-License-Identifier: Apache-2.0
"""Warns of rejected contributions, and notes them in the event log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from paceline.communication import Transport
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary

logger = logging.getLogger("paceline")

BROKEN = 3
"""After so many rejections in a row a worker is reported as probably broken."""


class Rejections:
    """Warns of rejected contributions, and notes them in the log.

    Args:
        transport: names the workers.
        note: writes an event into the log.

    Attributes:
        total: contributions rejected so far.
    """

    def __init__(self, transport: Transport, note: Callable[..., None]) -> None:
        self._transport, self._note = transport, note
        self.total = 0
        self._in_a_row: Counter[int] = Counter()  # of each rank

    def report(self, summary: ExchangeSummary) -> None:
        """Report the contributions that this exchange rejected."""
        self.total += len(summary.left_out)
        for rank, header in enumerate(summary.headers):
            if rank in summary.left_out:
                self._in_a_row[rank] += 1
                self._report_one(rank, header, summary)
            elif header.brings:
                self._in_a_row[rank] = 0

    def _report_one(self, rank: int, header: ExchangeHeader, summary: ExchangeSummary) -> None:
        name, times = self._transport.world.name(rank), self._in_a_row[rank]
        why = _why(rank, summary)
        logger.warning("%s left out of exchange %d: %s; it goes on from the global model", name, header.sequence, why)
        if times == BROKEN:
            logger.warning(
                "%s was left out %d times in a row and is probably broken: look at its memory (ECC errors, dmesg) and "
                "at its part of the data, or start it on another host",
                name,
                times,
            )
        self._note(
            "left_out",
            rank_left_out=rank,
            exchange=header.sequence,
            why=why,
            finite=header.finite,
            norm=header.norm if header.finite else None,
            in_a_row=times,
        )


def _why(rank: int, summary: ExchangeSummary) -> str:
    """Why a contribution was rejected."""
    header, between = summary.headers[rank], summary.between
    if not header.finite:
        return "inf or nan in what it brought"
    usual = f" where {between[0]:.3g} to {between[1]:.3g} is usual" if between is not None else ""
    return f"norm {header.norm:.3g}{usual}"
