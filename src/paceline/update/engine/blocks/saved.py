# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of blocks: saved, loaded, and resharded to another number of workers.

The keys are the checkpoint's format. A row stands for a fragment:

    outer      its outer state, name -> tensor
    numbers    of its blocks and of the optimizers' step counts
    passing    the codec's state, and the exchange that has not landed yet, if any ("flight")
    since      minibatches since its last exchange began

and the first row has, besides, where the sequence of all fragments' exchanges stands ("turns", "retimed", "entered").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from torch import Tensor

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.errors import CheckpointError
from paceline.rules.outer.base import Coefficients
from paceline.update.engine.blocks.chunks import restored
from paceline.update.engine.blocks.fragment_schedule import FragmentSchedule
from paceline.update.engine.blocks.fragmented_model import FragmentedModel
from paceline.update.engine.blocks.update import BlockUpdate
from paceline.update.exchange.exchanger import InFlightExchange
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary

Row = dict[str, Any]


def save(blocks: FragmentedModel) -> list[Row]:
    """What a checkpoint holds of every fragment; waits for exchanges under way."""
    schedule = blocks.schedule
    blocks.arrive()
    rows: list[Row] = [
        {"outer": update.state.tensors(), "numbers": numbers(update), "passing": _passing(update), "since": since}
        for update, since in zip(blocks.updates, schedule.since, strict=True)
    ]
    rows[0]["turns"] = [schedule.begun, schedule.steps, sorted(schedule.made.items())]
    rows[0]["retimed"] = [schedule.at, schedule.shift, schedule.asked]
    rows[0]["entered"] = blocks.entered
    return rows


def load(blocks: FragmentedModel, rows: Sequence[Row]) -> None:
    """Put back what `save` gave; after the optimizers' own state."""
    for update, row in zip(blocks.updates, rows, strict=True):
        _load(update, row["outer"], row["numbers"], row["passing"])
    begun, steps, made = rows[0]["turns"]
    blocks.entered = list(rows[0]["entered"])
    since, under_way = [row["since"] for row in rows], {int(f): int(n) for f, n in made}
    blocks.schedule = FragmentSchedule(since, under_way, begun, steps, *rows[0]["retimed"])


def read(blocks: FragmentedModel, old: OldCheckpoint) -> list[Row]:
    """What all workers held alike of every fragment, from a checkpoint of another number of workers.

    Nothing where it was made without blocks: by one worker, or by the processes of one host that were one.

    Raises:
        CheckpointError: it does not fit.
    """
    rows: list[Row] = []
    for number, update in enumerate(blocks.updates):
        at: tuple[str | int, ...] = ("exchange", "blocks", number)
        row = {name: old.part(0, *at, name) for name in ("outer", "numbers", "turns")}
        if row["outer"] is None:
            return []
        row["said"] = old.part(0, *at, "passing", "flight", "said")
        misfit = _misfit(update, row["outer"])
        if misfit:
            raise CheckpointError(f"the checkpoint does not fit what is exchanged: {misfit}")
        rows.append(row)
    return rows


def reshard(blocks: FragmentedModel, rows: Sequence[Row]) -> None:
    """Begin new blocks from what `read` gave, or first ones where that is nothing; after the optimizers' own state."""
    if not rows:
        for update in blocks.updates:
            _start(update)
    for update, row in zip(blocks.updates, rows, strict=False):
        _reshard(update, row["outer"], row["numbers"], row["said"])
    blocks.schedule = FragmentSchedule([0] * len(blocks.updates))
    blocks.align(int(rows[0]["turns"][0]) if rows else 0)


def join(blocks: FragmentedModel, rows: Sequence[Row]) -> None:
    """Begin in the middle of the other workers' blocks, from what `read` gave; after the optimizers' own state."""
    for update, row in zip(blocks.updates, rows, strict=True):
        _reshard(update, row["outer"], row["numbers"], None, ahead=row["numbers"]["ahead"])
    blocks.align(int(rows[0]["turns"][0]))


# -- of one fragment ------------------------------------------------------------------------------


def numbers(update: BlockUpdate) -> dict[str, Any]:
    """The numbers that a checkpoint holds."""
    return {
        "block": update.numbers.block,
        "rho": update.numbers.rho,
        "ahead": update.numbers.ahead,
        "counts": update.optimizers.counts,
        "sums": [int(state.checksum) for state in update.state.all],
        "workers": update.numbers.workers,
        "norms": update.norms.state() if update.norms is not None else [],
    }


def _passing(update: BlockUpdate) -> dict[str, Any]:
    """The codec's state, and an exchange that has not landed yet."""
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


def _load(update: BlockUpdate, outer: dict[str, Tensor], said: dict[str, Any], passing: dict[str, Any]) -> None:
    """Put outer state back; makes the moments' where the saved run had them."""
    state = update.state
    update.numbers.restart(said["block"], said["rho"], said["ahead"])
    _load_norms(update, said)
    update.optimizers.counts = list(said["counts"])
    update.in_flight, update.chunks = None, []
    state.release_snapshot()
    if len(said["sums"]) < len(state.all):  # a run goes back to before the optimizers had any state
        state.drop_moments()
    if state.moments is None and len(said["sums"]) > len(state.all):
        state.make_moments()
    for one, checksum in zip(state.all, said["sums"], strict=True):
        one.checksum.fill_(checksum)
    for name, tensor in state.tensors().items():
        tensor.copy_(outer[name])
    if passing["codec"]:
        update.prepare()
        for chunk, kept in zip(update.chunks, passing["codec"], strict=True):
            chunk.state = restored(kept, chunk.device)
    if passing["flight"] is not None:
        _resume_exchange(update, passing["flight"])


def _load_norms(update: BlockUpdate, said: dict[str, Any]) -> None:
    """A run that was saved without a guard has none to give."""
    if update.norms is not None:
        update.norms.load(said.get("norms", []))


def _resume_exchange(update: BlockUpdate, saved: dict[str, Any]) -> None:
    """The exchange had arrived, and lands when the schedule says so."""
    update.left_out = saved["left_out"]
    update.numbers.hold(Coefficients(*saved["coefficients"]))
    for state, snapshot in zip(update.state.all, saved["then"], strict=True):
        state.snapshot = snapshot.to(state.device, copy=True) if snapshot is not None else None
    kept = [restored(state, chunk.device) for chunk, state in zip(update.chunks, saved["codec"], strict=True)]
    arrived = list(zip(update.chunks, kept, strict=True))
    update.in_flight = InFlightExchange.arrived(update.exchanger, _summary(saved["said"]), arrived)


def _summary(rows: Sequence[list[int]]) -> ExchangeSummary:
    return ExchangeSummary(tuple(ExchangeHeader.unpack(row) for row in rows))


def _misfit(update: BlockUpdate, outer: dict[str, Tensor]) -> str:
    """What of saved outer state does not fit the parameters and buffers here; nothing where all does."""
    here = update.state.tensors()
    for name, tensor in here.items():
        if name in outer and outer[name].shape != tensor.shape:
            return f"{name} has {tensor.numel()} elements here and {outer[name].numel()} in the checkpoint"
    names = {name.split("/")[0] for name in outer.keys() ^ here.keys()}
    own = {state.fragment.key.split("/")[0] for state in update.state.averaged}
    return f"the trained {', '.join(sorted(names & own))} are others" if names & own else ""


def _start(update: BlockUpdate) -> None:
    """Begin the first block from the model and the optimizers' state as they are, the same on all workers."""
    update.numbers.restart()
    _renew(update, update.optimizers.have_state)
    update.capture()
    update.state.sum_anew()


def _renew(update: BlockUpdate, moments: bool) -> None:
    """No exchange is under way, and codecs remember nothing."""
    update.forget()
    update.state.drop_moments()
    if moments:
        update.state.make_moments()
    update.state.refresh()


def _reshard(
    update: BlockUpdate,
    outer: dict[str, Tensor],
    said: dict[str, Any],
    headers: Sequence[list[int]] | None,
    ahead: float | None = None,
) -> None:
    """Begin a new block from the outer state that another number of workers left.

    Args:
        outer: the outer state.
        said: what `numbers` gave.
        headers: of an exchange that had arrived and had not landed yet: its result is in `outer` already.
        ahead: the look-ahead of the block's start; None: what it is for as many workers as there are now.
    """
    update.numbers.restart(said["block"], said["rho"], said["ahead"])
    _load_norms(update, said)
    update.optimizers.counts = list(said["counts"])
    if headers is not None and (summary := _summary(headers)).weight != 0:
        end = update.numbers.count_in(summary, said.get("workers", len(headers)))
        update.optimizers.count_in(summary.tau, end.ahead)
    if ahead is None:
        ahead = update.numbers.coefficients().momentum if update.numbers.block else 0.0
    update.numbers.ahead = ahead
    averaged = len(said["sums"]) > len(update.state.averaged)  # moments had been exchanged
    _renew(update, averaged)
    for name, tensor in update.state.tensors().items():
        tensor.copy_(outer[name])
    update.state.restore()
    update.optimizers.begin_block(averaged)
    update.state.sum_anew()
