# SPDX-License-Identifier: Apache-2.0
"""Block payloads: exchanges a block's contribution and applies the mean. Knows no method by name.

Gradient payloads are served by :mod:`paceline.update.engine.gradients.update`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from paceline.core.flat import Modules
from paceline.core.optimizer_state import Owned
from paceline.core.shards import Shards
from paceline.errors import NonFiniteError
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.chunks import OuterStateChunk, cut_states, packings
from paceline.update.engine.blocks.fragment_state import FragmentState
from paceline.update.engine.blocks.local_optimizers import LocalOptimizers
from paceline.update.engine.blocks.numbers import BlockNumbers
from paceline.update.engine.settings import Settings
from paceline.update.exchange.exchanger import IN_FLIGHT, Exchanger, StartedExchange
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary
from paceline.update.exchange.kind import NO_PAYLOAD, ExchangeKind
from paceline.update.exchange.outliers import block_norms
from paceline.update.exchange.work import LocalWork
from paceline_plugins.receipts.observer import Receipts


class BlockUpdate:
    """Block payloads of one fragment: its parameters, buffers and moments under one rule.

    Args:
        rule: the rule.
        exchanger: the connection.
        model: the user's modules, for their buffers; None if another fragment holds these.
        owned: (optimizer, its named parameters) pairs of this fragment.
        settings: of the run: the device of outer state, and the outlier policy.
        kind: of its exchanges.
        workers: N, as the rule counts them.

    Attributes:
        numbers: of its blocks.
        state: its outer state.
        optimizers: the worker's own.
        chunks: its outer state cut for the wire; empty before the first exchange.
        in_flight: the pending exchange, if any.
        left_out: whether this worker's part of the last exchange was not finite, or an outlier.
        norms: the recently accepted norms; None without an outlier policy.
        receipts: of what this worker brings and takes, or None.
        shards: the processes that hold this worker's parameters, of all fragments.
    """

    def __init__(
        self,
        rule: Rule,
        exchanger: Exchanger,
        model: Modules | None,
        owned: Owned,
        settings: Settings,
        kind: ExchangeKind,
        workers: int,
    ) -> None:
        self.exchanger, self._kind, self._period = exchanger, kind, rule.schedule.period
        self._overlapped = rule.schedule.overlap > 0
        self._mixes_at_once = rule.payload.mixing is not None and not self._overlapped
        self.optimizers = LocalOptimizers(rule.delta, owned)
        self.optimizers.fit(workers)
        self.optimizers.count()
        self.numbers = BlockNumbers(rule, workers)
        self.state = FragmentState(
            rule,
            model,
            self.optimizers,
            self.numbers,
            settings.outer_state_device,
            self._mixes_at_once,
            lambda: exchanger.transport.world,
        )
        self.chunks: list[OuterStateChunk] = []
        self.in_flight: StartedExchange | None = None
        self.left_out = False
        self.norms = block_norms(settings.guard, lambda: [one.anchor for one in self.state.parameters])
        self._measures = self.norms is not None or rule.follows_diversity
        if self._measures:
            self.state.take_mean_norms()
        self.receipts: Receipts | None = None
        self.shards = Shards(())

    def retune(self, rule: Rule) -> None:
        """Continue with other numbers of the rule; an in-flight exchange keeps its own. Another codec, which comes
        between two exchanges, begins without residuals."""
        if rule.codec != self.numbers.rule.codec:
            self.chunks = []
        self.numbers.rule, self._period = rule, rule.schedule.period
        for one in self.state.parameters:
            one.retune(rule.merging)

    def prepare(self) -> None:
        """Create outer state that needs the optimizers' state, and look up addresses."""
        if self.state.moments is None:
            self.state.make_moments()
            self.chunks = []
        self.state.refresh()
        if not self.chunks:
            rule, overlapped, measured = self.numbers.rule, self._overlapped, self._measures
            self.chunks = cut_states(self.state.all, rule, self.exchanger, self.numbers, overlapped, measured)

    # -- the exchange -----------------------------------------------------------------------------

    def begin(self, work: LocalWork, overlapped: bool) -> None:
        """End the block: send its contribution.

        Args:
            work: this worker's minibatches in the block.
            overlapped: whether the next block computes during the exchange.
        """
        self.prepare()
        early = partial(
            self.exchanger.begin_early, self.chunks, factor=work.minibatches / self._period, number=self.numbers.block
        )
        for chunk in self.chunks:
            chunk.packed = False  # an exchange that failed may have left it
            chunk.on_packed = early if chunk.device.type == "cpu" and not work.stands else None
        self.numbers.minibatches = work.minibatches
        self.numbers.freeze()
        for one in self.state.buffers:
            one.reset_nonfinite()
        if self.receipts is not None and work.minibatches:
            self.receipts.gave(self._kind.fragment, self.state)
        header = self._header(work)
        if not header.usual:
            header = self.exchanger.pre_vote(header)
        self.left_out = not header.finite or (header.brings and not header.factor)
        if overlapped:
            self._begin_next_block()
        elif self.left_out and self._mixes_at_once:  # drop all of an invalid block
            self.restart()
        chunks_in_flight = 0 if overlapped else IN_FLIGHT
        self.in_flight = self.exchanger.start(
            header, self.chunks, self.numbers.block, chunks_in_flight, self.state.checksum
        )

    def _header(self, work: LocalWork) -> ExchangeHeader:
        measured = self._measures and work.minibatches > 0
        norm, finite = self.state.measure(partial(packings, self.chunks)) if measured else (0.0, self.state.finite())
        norm, mean_norm, finite = self.shards.together(norm, self.state.mean_norm, finite)
        rank = self.exchanger.transport.world.rank
        return ExchangeHeader(
            sequence=0,
            kind=NO_PAYLOAD if work.stands else self._kind,
            brings=work.minibatches > 0 and not work.stands,
            leaving=work.leaving,
            finite=finite,
            minibatches=work.minibatches,
            norm=norm,
            factor=work.minibatches / self._period if finite else 0.0,
            total=work.total,
            checksum=self.state.checksum(),
            usual=self.shards.all(not norm or self.norms is None or self.norms.usual(rank, norm)),
            merges=work.merges,
            mean_norm=mean_norm,
        )

    def _begin_next_block(self) -> None:
        """Begin the next block before this one's result has arrived."""
        if self.left_out:
            self.restart()
        self.state.take_snapshot()
        self.optimizers.reset_for_overlap()

    def land(self, made: int | None) -> ExchangeSummary:
        """Apply the mean, and start the next block from the result.

        Args:
            made: minibatches since `begin`; None without overlap.

        Raises `NonFiniteError`, `DesyncError` or `MismatchError` with the outer state untouched, `PeerLostError`.
        """
        assert self.in_flight is not None
        exchange, self.in_flight = self.in_flight, None
        self.state.refresh()
        try:
            summary = exchange.finish(made or 0)
            rank = self.exchanger.transport.world.rank  # only now: an elastic run may have other members
            own = summary.headers[rank]
            self.left_out = self.left_out or (own.brings and not own.factor)
            if summary.weight > 0:
                end = self.numbers.advance(summary)
                self.optimizers.advance(summary.tau, end.ahead, made, self.left_out)
            elif self.left_out:  # nobody else brought anything
                self.restart()
        except NonFiniteError:
            self.restart()
            raise
        finally:
            self.state.release_snapshot()
            self.numbers.release()
        if self.receipts is not None and not summary.empty:
            sequence = summary.headers[0].sequence
            self.receipts.merged(self._kind.fragment, sequence, self.state.tensors(), summary)
        if self.norms is None:
            return summary
        between = self.norms.between
        self.norms.add(summary.accepted, summary.changed)
        return replace(summary, between=between)

    def arrive(self) -> None:
        """Wait until the outer state has the in-flight exchange's result."""
        if self.in_flight is not None:
            self.in_flight.arrive()

    # -- the block's start ------------------------------------------------------------------------

    def restart(self) -> None:
        """Restore the block's start, after an invalid block."""
        self.state.restore()
        self.optimizers.restart()

    def capture(self) -> None:
        """Take the present model and moments as the first block's start; after `prepare`."""
        self.optimizers.count()
        self.state.capture()

    def forget(self) -> None:
        """Drop the in-flight exchange and the codecs' state."""
        self.chunks, self.in_flight, self.left_out = [], None, False

    def renumber(self, workers: int) -> None:
        """Adapt to a changed number of workers: gains follow N, codecs start afresh, all states are compared again.

        The present block keeps its start.
        """
        self.optimizers.fit(workers)
        self.numbers.renumber(workers)
        if self.norms is not None:
            self.norms.mix()
        for chunk in self.chunks:
            chunk.state = {}
        self.state.renew_checksums()
