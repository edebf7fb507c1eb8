# SPDX-License-Identifier: Apache-2.0
"""Between two rounds: sum the workers' costs, re-allocate the words on worker 0, send the table to all."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
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
"""Largest memory of dense costs; larger ones are kept as factors."""
BEAT_S = 2.0
"""Seconds between two messages to waiting workers: far below any deadline."""
PIECE = 1 << 22
"""Elements of a tensor in one exchange, to stay below deadlines."""
RUNNING, DONE, FAILED = 0, 1, 2
Costs = DenseCosts | FactoredCosts


# -- costs ------------------------------------------------------------------------------------------


def fits_dense(table: WordTable, most: int | None = None) -> bool:
    """Whether dense costs take no more than so many bytes, DENSE_BYTES if none are given."""
    return 4 * table.words * (table.rows + table.columns) <= (DENSE_BYTES if most is None else most)


def zero_costs(table: WordTable, dimension: int, dense: bool, device: torch.device) -> Costs:
    """Zero costs of a table and an output layer of this size."""
    if dense:
        return DenseCosts(table.words, table.rows, table.columns, device=device)
    return FactoredCosts(table.words, dimension, device=device)


def new_costs(model: LightRNN, kind: str | None = None) -> Costs:
    """Zero costs; by default of the kind that fits into memory."""
    table = model.table
    dense = fits_dense(table) if kind is None else kind == "dense"
    return zero_costs(table, model.dimension, dense, place(model))


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
    """The cost of each word in each row and column, over a text, with the current weights.

    Args:
        model: dropout is off meanwhile.
        corpus: the text, read in passages as in training.
        length: of a passage, words.
        window: words at a time.
        batch: passages in parallel.
        part: (k, n) for the k-th of n workers, whose costs sum to those of the whole text.
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
    """Write costs and their table to a file, atomically; returns the file's checksum."""
    kind = "dense" if isinstance(costs, DenseCosts) else "factored"
    tensors = {f"costs.{k}": x.detach().cpu().contiguous() for k, x in enumerate(costs.tensors())}
    with files.whole(path) as new:
        save_file({**tensors, "cells": table.cells.cpu()}, new, {"format": FORMAT, "kind": kind})
    return checksum(path)


def load_costs(path: Path, model: LightRNN) -> Costs:
    """Read what `save_costs` wrote for a model with this table.

    Raises:
        CheckpointError: the file has another format, is damaged, or is of another table.
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
    """A file's checksum; empty if there is no file."""
    return files.sha256(path) if path.is_file() else ""


# -- among the workers ------------------------------------------------------------------------------


@torch.no_grad()
def add_up(run: Run, tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by the sum over the workers."""
    if run.world.size == 1:
        return
    for tensor in tensors:
        for piece in torch.split(tensor.view(-1), PIECE):
            run.messages.all_reduce(piece).wait()


def by_one(run: Run, work: Callable[[], Any]) -> Any:
    """Do long work on worker 0 while the other workers wait; returns None on them.

    Worker 0 works in a thread, and its main thread sends a message every `BEAT_S` seconds. So it is not declared lost
    however long the work takes, and all workers notice if it dies.

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
    future: Future[Any] = Future()

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again below
            future.set_exception(error)

    threading.Thread(target=body, name="paceline-lightrnn", daemon=True).start()
    while wait([future], BEAT_S).not_done:
        _tell(run, RUNNING)
    _tell(run, DONE if future.exception() is None else FAILED)
    return future.result()


def _tell(run: Run, word: int = RUNNING) -> int:
    """Broadcast worker 0's message."""
    said = torch.tensor([word])
    run.messages.broadcast(said).wait()
    return int(said)


def same_table(run: Run, table: WordTable, cells: Tensor | None) -> WordTable:
    """The table with worker 0's new cells, checked to be equal on all workers.

    Args:
        run: of all workers.
        table: the old one.
        cells: the new ones on worker 0; None elsewhere.

    Raises:
        DesyncError: the workers received different tables.
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
    """A hash of the table."""
    text = f"{table.rows} {table.columns} ".encode()
    return hashlib.sha256(text + table.cells.cpu().numpy().tobytes()).hexdigest()
