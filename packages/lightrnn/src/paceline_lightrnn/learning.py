# SPDX-License-Identifier: Apache-2.0
"""Learns the table of any model that ends in a `TwoComponentSoftmax`: costs are gathered while it trains.

The cost of class w in row i is the sum over its samples of `-log P(row i | h)`, in column j of `-log P(column j | h,
the row of w)`; the new table is the perfect matching of classes and cells of least cost (Li et al., "LightRNN", NIPS
2016, section 3.3, where the classes are words).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline import MismatchError, Run, UnsupportedError
from paceline_lightrnn import rounds
from paceline_lightrnn.allocation import Allocation, reallocate
from paceline_lightrnn.parts import TwoComponentEmbedding, TwoComponentSoftmax
from paceline_lightrnn.state import PADDING


class TableLearner:
    """Gathers the costs of a table in each forward pass of the output layer; then gives all layers a better one.

    Up to 100,000 classes the costs themselves are kept, and those of all passes in training mode count. Above, their
    factors are kept, which are exact for weights that stand still: then those of all passes in evaluation mode count,
    and you run one such pass over the data before `reallocate`.

    >>> import torch
    >>> from paceline_lightrnn import TableLearner, TwoComponentSoftmax, WordTable
    >>> output = TwoComponentSoftmax(WordTable.random(100), 8)
    >>> learner = TableLearner(output)
    >>> loss = output(torch.randn(50, 8), torch.randint(100, (50,))).loss    # as in any training
    >>> found = learner.reallocate()
    >>> found.after < found.before, output.table == found.table
    (True, True)

    Args:
        output: the output layer, whose table is learned.
        embeddings: layers that have the same table, and get the new one as well.
        dense_bytes: most memory of costs that are kept as they are.

    Attributes:
        samples: that count so far, on this worker.

    Raises:
        MismatchError: the layers have different tables.
    """

    def __init__(
        self, output: TwoComponentSoftmax, *embeddings: TwoComponentEmbedding, dense_bytes: int = rounds.DENSE_BYTES
    ) -> None:
        for other in embeddings:
            if other.table != output.table:
                raise MismatchError(
                    f"the layers have different tables: {output.table!r}, {other.table!r}; give them one"
                )
        self._output, self._layers = output, (output, *embeddings)
        self._dense = rounds.fits_dense(output.table, dense_bytes)
        self._costs: rounds.Costs | None = None
        self.samples = 0
        self._hook = output.register_forward_hook(self._after_forward, with_kwargs=True)

    def close(self) -> None:
        """Gather no more; the layers stay as they are."""
        self._hook.remove()

    def reallocate(self, run: Run | None = None) -> Allocation:
        """Give all layers the best table for the costs so far, and begin new costs.

        The optimizer's state stays, since vectors belong to rows and columns. Directly after it the loss is higher,
        since the weights do not know the new table yet.

        Args:
            run: of `paceline.attach`, on several workers, which all call this at the same place of the program: their
                costs are summed, rank 0 allocates, all get its table.

        Returns:
            The allocation; on ranks other than 0 of a run the table alone is known, and its costs are nan.

        Raises:
            UnsupportedError: no sample has counted.
        """
        counted = torch.tensor([float(self.samples)], dtype=torch.float64)
        if run is not None:
            rounds.add_up(run, [counted, *self._ready().tensors()])
        if not float(counted):
            mode = "training" if self._dense else "evaluation"
            raise UnsupportedError(
                f"no sample has counted since the last re-allocation: for this table those of forward passes in {mode} "
                f"mode count; call {'train' if self._dense else 'eval'}() and run the model over the data first"
            )
        table = self._output.table
        found: Allocation | None = self._found() if run is None else rounds.by_one(run, self._found)
        if run is not None:
            table = rounds.same_table(run, table, None if found is None else found.table.cells)
        elif found is not None:
            table = found.table
        for layer in self._layers:
            layer.table = table
        self._forget()
        unknown = float("nan")
        return found or Allocation(table, unknown, unknown, unknown, "on rank 0", 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The table and the costs so far, for a checkpoint: `run.include(table=learner)`."""
        return {"cells": self._output.table.cells.cpu(), "samples": self.samples, "costs": self._ready().tensors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        table = self._output.table.with_cells(state["cells"])
        for layer in self._layers:
            layer.table = table
        self._forget()
        self.samples = state["samples"]
        for tensor, value in zip(self._ready().tensors(), state["costs"], strict=True):
            tensor.copy_(value)

    def _ready(self) -> rounds.Costs:
        """The costs so far, where the layer is now."""
        output = self._output
        if self._costs is None:
            self._costs = rounds.zero_costs(output.table, output.in_features, self._dense, output.row_out.device)
        return self._costs

    def _forget(self) -> None:
        self._costs, self.samples = None, 0

    def _found(self) -> Allocation:
        return reallocate(self._ready().source(self._output), self._output.table)

    @torch.no_grad()
    def _after_forward(
        self, output: TwoComponentSoftmax, args: tuple[Tensor, ...], named: dict[str, Tensor], result: Any
    ) -> None:
        if output.training and not self._dense:
            self._forget()  # the weights of the last evaluation are about to change
        if output.training != self._dense:
            return
        hidden, target = _arguments(*args, **named)
        words = target.masked_fill(target == output.ignore_index, PADDING)
        self._ready().add(output, words, *output.halves(hidden, target))
        self.samples += int((words != PADDING).sum())


def _arguments(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, target
