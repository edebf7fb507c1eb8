# SPDX-License-Identifier: Apache-2.0
"""Between two rounds: the workers' costs are added up, one worker allocates the words anew, all get the same table."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from paceline import CheckpointError, DesyncError, PeerLostError, Run
from paceline_lightrnn import files
from paceline_lightrnn.corpus import Corpus, Passages
from paceline_lightrnn.costs import DenseCosts, FactoredCosts
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.scoring import place
from paceline_lightrnn.state import PADDING
from paceline_lightrnn.table import WordTable

FORMAT = "paceline lightrnn costs 1"
DENSE_BYTES = 1 << 28
"""Largest memory of costs that are kept for each word and each row and column; above it they are kept as factors."""
BEAT_S = 2.0
"""Seconds between two words to those who wait: far below any deadline."""
PIECE = 1 << 22
"""Numbers of a tensor that travel at once, so that no exchange takes as long as a deadline."""
RUNNING, DONE, FAILED = 0, 1, 2
Costs = DenseCosts | FactoredCosts


# -- costs ------------------------------------------------------------------------------------------


def fits_dense(table: WordTable) -> bool:
    """Whether exact sums for every word and every row and column are small enough."""
    return 4 * table.words * (table.rows + table.columns) <= DENSE_BYTES


def new_costs(model: LightRNN, kind: str | None = None) -> Costs:
    """Costs of which nothing was gathered; by default of the kind that fits into memory."""
    table = model.table
    dense = fits_dense(table) if kind is None else kind == "dense"
    if dense:
        return DenseCosts(table.words, table.rows, table.columns, device=place(model))
    return FactoredCosts(table.words, model.dimension, device=place(model))


@torch.no_grad()
def gather(
    model: LightRNN,
    corpus: Corpus,
    *,
    length: int,
    window: int,
    batch: int = 20,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int], None] | None = None,
) -> Costs:
    """What each word would have cost in each row and column, over a text, with the weights as they are.

    Args:
        model: dropout is off meanwhile.
        corpus: the text, read in passages as in training.
        length: of a passage, words.
        window: words that are read at a time.
        batch: passages side by side.
        part: (k, n) for the k-th of n workers; their costs add up to those of the whole text.
        progress: called with the number of words so far.
    """
    passages = Passages(corpus, length)
    mine = Subset(passages, range(part[0], len(passages), part[1]))
    costs, was, done = new_costs(model), model.training, 0
    model.eval()
    try:
        for rows in DataLoader(mine, batch):
            state = model.begin(len(rows))
            for words in torch.split(rows.to(place(model)), window, 1):
                h_row, h_column, state = model.halves(words, state)
                costs.add(model, words, h_row, h_column)
            done += int((rows != PADDING).sum())
            if progress is not None:
                progress(done)
    finally:
        model.train(was)
    return costs


def save_costs(path: Path, costs: Costs, table: WordTable) -> str:
    """Write costs and the table that they were gathered with to a file, in one piece; the file's checksum."""
    kind = "dense" if isinstance(costs, DenseCosts) else "factored"
    tensors = {f"costs.{k}": x.detach().cpu().contiguous() for k, x in enumerate(costs.tensors())}
    with files.whole(path) as new:
        save_file({**tensors, "cells": table.cells.cpu()}, new, {"format": FORMAT, "kind": kind})
    return checksum(path)


def load_costs(path: Path, model: LightRNN) -> Costs:
    """Read what `save_costs` wrote for a model with this table.

    Raises:
        CheckpointError: it is something else, damaged, or was gathered with another table.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise CheckpointError(f"{path} holds no costs: its format is {json.dumps(about.get('format'))}")
            if not torch.equal(file.get_tensor("cells"), model.table.cells.cpu()):
                raise CheckpointError(f"{path} was gathered with another table than the model's; gather costs anew")
            costs = new_costs(model, about.get("kind"))
            for number, tensor in enumerate(costs.tensors()):
                found = file.get_tensor(f"costs.{number}")
                if found.shape != tensor.shape:
                    raise CheckpointError(f"{path} has costs of shape {tuple(found.shape)}, not {tuple(tensor.shape)}")
                tensor.copy_(found)
            return costs
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the costs {path}: {error}; gather them anew") from error


def checksum(path: Path) -> str:
    """Of a file's content; empty where there is none."""
    return files.sha256(path) if path.is_file() else ""


# -- among the workers ------------------------------------------------------------------------------


@torch.no_grad()
def add_up(run: Run, tensors: Iterable[Tensor]) -> None:
    """Make each tensor the sum over the workers, in place."""
    if run.world.size == 1:
        return
    for tensor in tensors:
        for piece in torch.split(tensor.view(-1), PIECE):
            run.messages.all_reduce(piece).wait()


def by_one(run: Run, work: Callable[[], Any]) -> Any:
    """Let worker 0 do something that takes long, while the others wait for it; None on them.

    It works in a thread, and its main thread says every `BEAT_S` seconds that it is still there. So nobody takes it
    for lost, however long the work takes, and everybody notices when it dies.

    Raises:
        PeerLostError: the work failed; on worker 0 the error itself is raised.
    """
    if run.world.size == 1:
        return work()
    if run.world.rank:
        while (word := _tell(run)) == RUNNING:
            pass
        if word == FAILED:
            raise PeerLostError(run.world.sign("worker 0 failed in what all wait for; its own output says why"))
        return None
    thread = _Working(work)
    thread.start()
    while thread.is_alive():
        thread.join(BEAT_S)
        if thread.is_alive():
            _tell(run, RUNNING)
    _tell(run, DONE if thread.error is None else FAILED)
    if thread.error is not None:
        raise thread.error
    return thread.result


class _Working(threading.Thread):
    """A thread that keeps what came of its work."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(name="paceline-lightrnn", daemon=True)
        self._work, self.result, self.error = work, None, None  # type: Callable[[], Any], Any, BaseException | None

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # raised again by who waits for it
            self.error = error


def _tell(run: Run, word: int = RUNNING) -> int:
    """Worker 0's word, on all workers."""
    said = torch.tensor([word])
    run.messages.broadcast(said).wait()
    return int(said)


def same_table(run: Run, table: WordTable, cells: Tensor | None) -> WordTable:
    """The table with worker 0's new cells, on all workers, checked to be the same.

    Args:
        run: of all workers.
        table: the old one.
        cells: the new ones; None on other workers than the first.

    Raises:
        DesyncError: the workers have got different tables.
    """
    mine = (table.cells if cells is None else cells).cpu().clone()
    if run.world.size > 1:
        for piece in torch.split(mine, PIECE):
            run.messages.broadcast(piece).wait()
    new = table.with_cells(mine)
    sums = run.messages.gather(table_sum(new)) if run.world.size > 1 else []
    if len(set(sums)) > 1:
        rows = ", ".join(f"worker {rank}: {one[:12]}" for rank, one in enumerate(sums))
        raise DesyncError(run.world.sign(f"the workers hold different tables ({rows}); resume from the last state"))
    return new


def table_sum(table: WordTable) -> str:
    """The same for equal tables."""
    text = f"{table.rows} {table.columns} ".encode()
    return hashlib.sha256(text + table.cells.cpu().numpy().tobytes()).hexdigest()
