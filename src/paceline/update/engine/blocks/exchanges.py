# SPDX-License-Identifier: Apache-2.0
"""The block exchanges of a run: starts, lands, times and logs them."""

from __future__ import annotations

from paceline.update.engine import agreement, global_model
from paceline.update.engine.blocks.fragmented_model import FragmentedModel
from paceline.update.engine.blocks.retuning import Retuning
from paceline.update.engine.collective_calls import MergePoint
from paceline.update.engine.context import RunContext
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import ExchangeSummary


class BlockExchanges:
    """The block exchanges of a run.

    Args:
        run: the context that the parts of the run share.
        blocks: all fragments of the model.
        exchanger: the connection among all workers.
        retuning: changes the rule's numbers between two exchanges.
    """

    def __init__(self, run: RunContext, blocks: FragmentedModel, exchanger: Exchanger, retuning: Retuning) -> None:
        self._run, self.blocks, self._exchanger, self._retuning = run, blocks, exchanger, retuning
        self._merge_point = MergePoint(run.transport.world, len(blocks.updates))

    def advance(self, idle: bool) -> None:
        """After a step of a block: land the exchanges that are due, and begin the next one if it is due.

        Args:
            idle: whether another process of the host made it.
        """
        self._exchanger.progress()
        blocks = self.blocks
        blocks.schedule.stepped()
        for fragment in blocks.landing():
            self.land(fragment)
        self._read_requests(rests=False)
        if blocks.due():
            self._end_block(leaving=False, idle=idle)
            self._read_requests(rests=False)

    def _end_block(self, leaving: bool, idle: bool = False, waits: bool = False) -> ExchangeSummary | None:
        """End a fragment's block; returns the summary if the worker waits for the result."""
        fragment = self.blocks.next
        self._run.monitor.begin()
        self.blocks.begin(self._run.progress.steps, leaving, idle, waits)
        if fragment in self.blocks.schedule.made:
            self._run.monitor.sent()
            return None
        return self.land(fragment, begun=True)

    def land(self, fragment: int, begun: bool = False) -> ExchangeSummary:
        """Wait for an exchange, and apply it."""
        monitor = self._run.monitor
        if not begun:
            monitor.begin()
        summary = self.blocks.land(fragment)
        self._note(summary, fragment)
        return summary

    def _note(self, summary: ExchangeSummary, fragment: int) -> None:
        """Note an exchange that was applied."""
        self._merge_point.look(summary)
        effective = self.blocks.updates[fragment].numbers.diversity.effective
        timing, block = self._exchanger.timing, self.blocks.block
        self._run.monitor.end(timing, summary, block=block, warmup=False, effective=effective)

    def wait(self, total: int) -> ExchangeSummary:
        """At the end of this worker's pass: join the others' blocks, with what it has made so far, until all are there.

        Args:
            total: this worker's minibatches, for the header.

        Returns:
            The headers then.
        """
        while True:
            self._read_requests(rests=True)
            pending_header = self._exchanger.open(self.blocks.waiting_header(total))
            if pending_header.summary().all_stand:
                return pending_header.summary()
            self.land_all()  # only now: what is in flight may stay there if no exchange follows
            self._exchanger.hold(pending_header)
            fragment = self.blocks.next
            self._run.monitor.begin()
            summary = self.blocks.stand(self._run.progress.steps)
            self._note(summary, fragment)
            if summary.asked:
                self._retuning.agree()
                self._retuning.apply(self.blocks.schedule.steps)

    def land_all(self) -> None:
        """Wait for every pending exchange, and apply it."""
        for fragment in sorted(self.blocks.schedule.made):
            self.land(fragment)

    def _read_requests(self, rests: bool) -> None:
        """Agree on the tuning requests that are due, and apply them."""
        while (now := self.blocks.requests_due(rests)) is not None:
            self._retuning.agree()
            self._retuning.apply(now)

    def merge(self) -> None:
        """End the current block of every fragment, at any number of minibatches."""
        blocks = self.blocks
        self.land_all()
        self._merge_point.together = 0
        while self._merge_point.together < len(blocks.updates):
            self._end_block(leaving=False, waits=True)
            while blocks.schedule.requests:
                blocks.schedule.requests.pop()
                self._retuning.agree()
        blocks.align(blocks.schedule.begun)
        self._retuning.apply(blocks.schedule.steps)

    def finish(self) -> None:
        """Exchange every fragment once more after all workers are done, and leave the global model in the user's."""
        quiet = 0
        while quiet < len(self.blocks.updates):
            self._read_requests(rests=True)
            at = self.blocks.schedule.at
            summary = self._end_block(leaving=True)
            assert summary is not None
            if summary.all_stand and not summary.all_leaving:
                self.blocks.uncount(at)
            quiet = quiet + 1 if summary.all_leaving else 0
        parts = self.blocks.global_parts
        others = [part for part in parts if part.fragment.from_rank_0]  # written since the last exchange, too
        agreement.broadcast_start(self._run.transport, [part.fragment for part in others])
        for part in others:
            part.capture()
        global_model.settle(self._run.model, parts)
