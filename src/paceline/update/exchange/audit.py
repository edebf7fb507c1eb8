# SPDX-License-Identifier: Apache-2.0
"""An exchange in which one contribution is judged by held-out losses (:mod:`paceline.update.exchange.judging`).

    1. the sum of all contributions, over the rule's route: the same bits as in any exchange
    2. an all-gather of its checksum, which draws the one that is judged
    3. the sum of the same contributions without that one, over the same route
    4. the losses of both means on each worker, and an all-gather of the votes

One of the two sums is applied: what was judged. Each worker keeps both sums and its own contribution until then, three
times what it exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DesyncError, MismatchError
from paceline.rules.codec import State
from paceline.update.exchange.agreement import compare, refuse_nothing
from paceline.update.exchange.checksum import combine, fold
from paceline.update.exchange.chunk import Chunk
from paceline.update.exchange.exchanger import Exchanger, PendingHeader
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary, to_bits
from paceline.update.exchange.judging import (
    AGAINST,
    WATCH,
    Choice,
    Evidence,
    Finding,
    H,
    Losses,
    choose,
    tally,
    with_waiting_dropped,
    without,
)
from paceline.update.exchange.outliers import Guard

Total = tuple[Tensor, State]
Candidate = tuple[ExchangeSummary, list[Tensor]]
"""The headers of contributions, and their sum in chunks."""


class Audit:
    """One worker's part in judging contributions; an :class:`paceline.update.exchange.exchanger.Auditor`.

    Args:
        guard: the settings.
        block: gives the number of blocks that have been exchanged.
        losses: gives the held-out loss of the block's start, and that of each candidate.

    Attributes:
        evidence: what earlier judgements of this worker found.
        suspect: whether this worker's last contribution was left out by a judgement.
        watched: whether this worker is watched.
    """

    def __init__(
        self, guard: Guard, block: Callable[[], int], losses: Callable[[Sequence[Candidate]], list[float]]
    ) -> None:
        self._every, self._block, self._losses = guard.audit_every, block, losses
        self.evidence = Evidence()
        self.suspect = self.watched = False
        self._found: tuple[Finding, bool] | None = None  # of the exchange under way, and whether the member was drawn

    def drop_waiting(self, summary: ExchangeSummary) -> ExchangeSummary:
        return with_waiting_dropped(summary, self._block(), self._every)

    def start(
        self, exchanger: Exchanger, header: ExchangeHeader, chunks: Sequence[Chunk], number: int
    ) -> AuditedExchange | None:
        pending_header = exchanger.voted
        assert pending_header is not None
        try:
            choice = self._choice(pending_header.summary())
        except (DesyncError, MismatchError):
            return None  # raised again when the exchange is finished
        return AuditedExchange(exchanger, self, header, chunks, number) if choice is not None else None

    def _choice(self, summary: ExchangeSummary) -> Choice | None:
        return choose(summary, self._block(), self._every)

    def judge(
        self,
        exchanger: Exchanger,
        summary: ExchangeSummary,
        chunks: Sequence[Chunk],
        given: Sequence[Tensor],
        totals: Sequence[Total],
        number: int,
    ) -> tuple[ExchangeSummary, Sequence[Total]]:
        """Judge one contribution, if this exchange judges any.

        Args:
            exchanger: the connection.
            summary: all headers.
            chunks: the payload.
            given: this worker's contribution to each chunk.
            totals: the sum of all contributions to each.
            number: counts the exchanges of this payload.

        Returns:
            The headers, with the judgement, and the sums that are to be applied.

        Raises:
            DesyncError: the sums differ between workers.
        """
        self._found = None
        choice = self._choice(summary)
        if choice is None or not summary.mean_of_norms:
            return summary, totals
        world = exchanger.transport.world
        checksum = combine(fold(_zero(total), total) for total, _ in totals)
        sums = _gather(exchanger, [checksum])
        compare({rank: row[0] for rank, row in enumerate(sums)}, summary.headers[0].sequence, world)
        judged = choice.rank(checksum)
        less = without(summary, [judged])
        rest = self._rest(exchanger, less, chunks, given, number)
        row = [0, 0, 0]
        if judged != world.rank:
            candidates = [(less, [t for t, _ in rest])] if rest else []
            start, *found = self._losses([*candidates, (summary, [t for t, _ in totals])])
            row = self._vote(summary, judged, Losses(start, *(found if rest else [start, *found])), choice.drawn)
        suspects = sum(h.suspect for rank, h in enumerate(summary.headers) if rank != judged)
        judgement = tally(_gather(exchanger, row), judged, suspects)
        after, sums_after = (less, rest) if judgement.left_out else (summary, totals)
        return replace(after, judgement=judgement), sums_after

    def _rest(
        self, exchanger: Exchanger, less: ExchangeSummary, chunks: Sequence[Chunk], given: Sequence[Tensor], number: int
    ) -> list[Total]:
        """The sum of the other contributions to each chunk; empty where there are none."""
        if not less.weight:
            return []
        own = less.headers[exchanger.transport.world.rank]
        counts = own.brings and own.factor > 0
        running = [exchanger.begin_with(chunk, x, number, counts) for chunk, x in zip(chunks, given, strict=True)]
        return [one.finish() for one in running]

    def _vote(self, summary: ExchangeSummary, judged: int, losses: Losses, drawn: bool) -> list[int]:
        """This worker's row of the votes."""
        header = summary.headers[judged]
        share, norm = header.factor / summary.weight, summary.mean_of_norms
        found = self.evidence.find(judged, losses, share, norm, header.suspect)
        self._found = found, drawn
        vote = AGAINST if found.evidence >= H else WATCH if found.evidence > 0 else 0
        return [vote, to_bits(losses.with_it), to_bits(losses.without)]

    def begin_among_others(self) -> None:
        """Ranks belong to other workers, and nobody is a suspect."""
        self.evidence.mix()
        self.suspect = self.watched = False

    def state(self) -> list[Any]:
        """For a checkpoint or a joining worker."""
        return [self.suspect, self.watched, self.evidence.state()]

    def load(self, saved: Sequence[Any]) -> None:
        """Restore what `state` gave."""
        self.suspect, self.watched = bool(saved[0]), bool(saved[1])
        self.evidence.load(saved[2])

    def settle(self, summary: ExchangeSummary, rank: int) -> None:
        """The exchange was applied: keep what was found; `rank`: this worker's."""
        judgement = summary.judgement
        if self._found is not None:
            self.evidence.keep(*self._found)
            self._found = None
        if judgement is not None and judgement.anew:
            self.evidence.clear()
            self.suspect = self.watched = False
        elif judgement is not None and judgement.rank == rank:
            self.suspect, self.watched = judgement.left_out, judgement.watched
        elif summary.headers[rank].factor:  # among few workers suspects count
            self.suspect = False


class AuditedExchange:
    """An exchange in which a contribution is judged, under way; a :class:`.exchanger.StartedExchange`.

    Args:
        exchanger: the connection; it has the headers.
        audit: judges.
        header: this worker's.
        chunks: the payload.
        number: counts the exchanges of this payload.
    """

    def __init__(
        self, exchanger: Exchanger, audit: Audit, header: ExchangeHeader, chunks: Sequence[Chunk], number: int
    ) -> None:
        exchanger.timing.wait_s = exchanger.timing.exchange_s = 0.0
        began = exchanger.transport.now()
        self._exchanger, self._audit, self._chunks, self._number = exchanger, audit, chunks, number
        self._pending_header: PendingHeader = exchanger.open(header)
        factor = header.factor if header.brings else 0.0
        self._given = [chunk.fill(factor) for chunk in chunks]
        self._running = [exchanger.begin_with(chunk, x, number) for chunk, x in zip(chunks, self._given, strict=True)]
        self._arrived: tuple[ExchangeSummary, Sequence[Total]] | None = None
        self._spent_s, self._vote_s = exchanger.transport.now() - began, exchanger.take_vote_s()

    @property
    def headers(self) -> tuple[ExchangeHeader, ...]:
        return self._arrive()[0].headers

    def arrive(self) -> list[State]:
        return [state for _, state in self._arrive()[1]]

    def _arrive(self) -> tuple[ExchangeSummary, Sequence[Total]]:
        if self._arrived is None:
            summary, totals = self._pending_header.summary(), [running.finish() for running in self._running]
            judge = self._audit.judge
            self._arrived = judge(self._exchanger, summary, self._chunks, self._given, totals, self._number)
        return self._arrived

    def finish(self, made: int = 0) -> ExchangeSummary:
        """Apply what was judged."""
        exchanger, timing = self._exchanger, self._exchanger.timing
        began = exchanger.transport.now()
        summary, totals = self._arrive()
        if summary.weight > 0:
            for chunk, (total, state) in zip(self._chunks, totals, strict=True):
                chunk.keep(state)
                chunk.land(total, summary)
        timing.exchange_s = timing.flight_s = self._spent_s + exchanger.transport.now() - began
        timing.wait_s = self._vote_s
        refuse_nothing(summary, exchanger.transport.world)
        return summary


def _zero(beside: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=beside.device)


def _gather(exchanger: Exchanger, row: list[int]) -> list[list[int]]:
    """Every worker's row, in rank order."""
    pending, rows = exchanger.gather_row(torch.tensor(row, dtype=torch.int64))
    pending.wait()
    return rows.tolist()
