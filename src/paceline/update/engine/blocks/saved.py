# SPDX-License-Identifier: Apache-2.0
"""The checkpoint state of blocks: save, load, and reshard to another number of workers.

The keys are the checkpoint's format. Each fragment has a row:

    outer      outer state, name -> tensor
    numbers    of its blocks, and the optimizers' step counts
    passing    the codec's state, and the in-flight exchange, if any ("flight")
    since      minibatches since its last exchange began

The first row also has the fragment schedule ("turns", "retimed") and the committed steps ("entered").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from torch import Tensor

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.errors import CheckpointError
from paceline.rules.outer.base import Coefficients
from paceline.update.engine.blocks.fragment import BlockUpdate
from paceline.update.engine.blocks.model import FragmentedModel, FragmentSchedule
from paceline.update.engine.blocks.outer_state import Diversity, restored
from paceline.update.exchange.exchanger import ExchangeHeader, ExchangeSummary, InFlightExchange

Row = dict[str, Any]


def save(blocks: FragmentedModel) -> list[Row]:
    """The row of each fragment; waits for in-flight exchanges."""
    schedule = blocks.schedule
    blocks.arrive()
    rows: list[Row] = [
        {"outer": update.state.tensors(), "numbers": numbers(update), "passing": _passing(update), "since": since}
        for update, since in zip(blocks.updates, schedule.since, strict=True)
    ]
    rows[0]["turns"] = [schedule.begun, schedule.steps, sorted(schedule.made.items())]
    rows[0]["retimed"] = [schedule.at, schedule.shift, schedule.requests]
    rows[0]["entered"] = blocks.entered
    return rows


def load(blocks: FragmentedModel, rows: Sequence[Row]) -> None:
    """Load the result of `save`; after the optimizers' own state."""
    for update, row in zip(blocks.updates, rows, strict=True):
        _load(update, row["outer"], row["numbers"], row["passing"])
    begun, steps, made = rows[0]["turns"]
    blocks.entered = list(rows[0]["entered"])
    since, in_flight = [row["since"] for row in rows], {int(f): int(n) for f, n in made}
    blocks.schedule = FragmentSchedule(since, in_flight, begun, steps, *rows[0]["retimed"])


def read(blocks: FragmentedModel, old: OldCheckpoint) -> list[Row]:
    """The rows that all workers shared, from a checkpoint of another number of workers; raises `CheckpointError` if it
    does not fit. Empty if it has no blocks: one worker made it, or one host with `within="host"`."""
    rows: list[Row] = []
    for number, update in enumerate(blocks.updates):
        at: tuple[str | int, ...] = ("exchange", "blocks", number)
        row = {name: old.part(0, *at, name) for name in ("outer", "numbers", "turns")}
        if row["outer"] is None:
            return []
        row["said"] = old.part(0, *at, "passing", "flight", "said")
        if misfit := _misfit(update, row["outer"]):
            raise CheckpointError(f"the checkpoint does not fit what is exchanged: {misfit}")
        rows.append(row)
    return rows


def reshard(blocks: FragmentedModel, rows: Sequence[Row]) -> None:
    """Begin new blocks from the result of `read`, first ones if it is empty; after the optimizers' own state."""
    if not rows:
        for update in blocks.updates:  # from the present model and optimizer state, the same on all workers
            update.numbers.restart()
            _renew(update, update.optimizers.have_state)
            update.capture()
            update.state.renew_checksums()
    for update, row in zip(blocks.updates, rows, strict=False):
        _reshard(update, row)
    blocks.schedule = FragmentSchedule([0] * len(blocks.updates))
    blocks.align(int(rows[0]["turns"][0]) if rows else 0)


def join(blocks: FragmentedModel, rows: Sequence[Row]) -> None:
    """Begin in the middle of the peers' blocks, from the result of `read`; after the optimizers' own state."""
    for update, row in zip(blocks.updates, rows, strict=True):
        _reshard(update, row, joins=True)
    blocks.align(int(rows[0]["turns"][0]))


# -- of one fragment ------------------------------------------------------------------------------


def numbers(update: BlockUpdate) -> dict[str, Any]:
    return {
        "block": update.numbers.block,
        "rho": update.numbers.rho,
        "ahead": update.numbers.ahead,
        "counts": update.optimizers.counts,
        "sums": [int(state.checksum) for state in update.state.all],
        "workers": update.numbers.workers,
        "diversity": list(astuple(update.numbers.diversity)),
        "mean_norm": update.state.mean_norm,
        "norms": update.norms.state() if update.norms is not None else [],
    }


def _passing(update: BlockUpdate) -> dict[str, Any]:
    codec = [dict(chunk.state) for chunk in update.chunks]
    if update.in_flight is None:
        return {"codec": codec, "flight": None}
    states = update.in_flight.arrive()
    return {
        "codec": codec,
        "flight": {
            "said": [header.row.tolist() for header in update.in_flight.headers],
            "coefficients": list(astuple(update.numbers.coefficients())),
            "left_out": update.left_out,
            "codec": [dict(state) for state in states],
            "then": [state.snapshot for state in update.state.all],
        },
    }


def _load(update: BlockUpdate, outer: dict[str, Tensor], saved: dict[str, Any], passing: dict[str, Any]) -> None:
    """Load a row; creates the moments' outer state if the saved run had it."""
    state = update.state
    _load_numbers(update, saved)
    update.in_flight, update.chunks = None, []
    state.release_snapshot()
    if len(saved["sums"]) < len(state.all):  # saved before the optimizers had state
        state.drop_moments()
    if state.moments is None and len(saved["sums"]) > len(state.all):
        state.make_moments()
    for one, checksum in zip(state.all, saved["sums"], strict=True):
        one.checksum.fill_(checksum)
    for name, tensor in state.tensors().items():
        tensor.copy_(outer[name])
    if passing["codec"]:
        update.prepare()
        for chunk, kept in zip(update.chunks, passing["codec"], strict=True):
            chunk.state = restored(kept, chunk.outer.device)
    if (flight := passing["flight"]) is not None:  # an exchange that had arrived; it lands when due
        update.left_out = flight["left_out"]
        update.numbers.freeze(Coefficients(*flight["coefficients"]))
        for one, snapshot in zip(state.all, flight["then"], strict=True):
            one.snapshot = snapshot.to(one.device, copy=True) if snapshot is not None else None
        pairs = zip(update.chunks, flight["codec"], strict=True)
        arrived = [(chunk, restored(kept, chunk.outer.device)) for chunk, kept in pairs]
        update.in_flight = InFlightExchange.arrived(update.exchanger, _summary(flight["said"]), arrived)


def _load_numbers(update: BlockUpdate, saved: dict[str, Any]) -> None:
    update.numbers.restart(saved["block"], saved["rho"], saved["ahead"])
    update.optimizers.counts = list(saved["counts"])
    update.numbers.diversity = Diversity(*saved.get("diversity", ()))
    update.state.mean_norm = saved.get("mean_norm", 0.0)
    if update.norms is not None:  # absent if the run was saved without a guard
        update.norms.load(saved.get("norms", []))


def _summary(rows: Sequence[list[int]]) -> ExchangeSummary:
    return ExchangeSummary(tuple(ExchangeHeader.unpack(row) for row in rows))


def _misfit(update: BlockUpdate, outer: dict[str, Tensor]) -> str:
    """How saved outer state differs from the parameters and buffers here; "" if it fits."""
    here = update.state.tensors()
    for name, tensor in here.items():
        if name in outer and outer[name].shape != tensor.shape:
            return f"{name} has {tensor.numel()} elements here and {outer[name].numel()} in the checkpoint"
    names = {name.split("/")[0] for name in outer.keys() ^ here.keys()}
    own = {state.fragment.key.split("/")[0] for state in update.state.averaged}
    return f"the trained {', '.join(sorted(names & own))} are others" if names & own else ""


def _renew(update: BlockUpdate, moments: bool) -> None:
    """Drop the in-flight exchange and the codecs' state; create the moments' outer state again."""
    update.forget()
    update.state.drop_moments()
    if moments:
        update.state.make_moments()
    update.state.refresh()


def _reshard(update: BlockUpdate, row: Row, joins: bool = False) -> None:
    """Begin a new block from the outer state that another number of workers left, which has the result of the exchange
    under way ("said") already. A worker that `joins` takes the look-ahead of the peers' block, and else that of the
    present number of workers."""
    saved, headers = row["numbers"], row["said"]
    _load_numbers(update, saved)
    if headers is not None and not joins and (summary := _summary(headers)).weight != 0:
        end = update.numbers.count_in(summary, saved.get("workers", len(headers)))
        update.optimizers.count_in(summary.tau, end.ahead)
    update.numbers.diversity = update.numbers.diversity.among(update.numbers.workers)
    if not joins:
        update.numbers.ahead = update.numbers.coefficients().momentum if update.numbers.block else 0.0
    averaged = len(saved["sums"]) > len(update.state.averaged)  # moments had been exchanged
    _renew(update, averaged)
    for name, tensor in update.state.tensors().items():
        tensor.copy_(row["outer"][name])
    update.state.restore()
    update.optimizers.begin_block(averaged)
    update.state.renew_checksums()
