# SPDX-License-Identifier: Apache-2.0
"""The table of a model that is no LightRNN, learned while it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from lightrnn_helpers import simulate
from paceline import MismatchError, UnsupportedError
from paceline_lightrnn import TableLearner, TwoComponentEmbedding, TwoComponentSoftmax, WordTable

CLASSES, WIDTH = 36, 8


def layer(**choices: Any) -> TwoComponentSoftmax:
    torch.manual_seed(0)
    return TwoComponentSoftmax(WordTable.random(CLASSES), WIDTH, **choices)


def samples(count: int = 200, seed: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=drawn), torch.randint(CLASSES, (count,), generator=drawn)


def cost(output: TwoComponentSoftmax, hidden: Tensor, target: Tensor, cells: Tensor) -> float:
    """What the classes cost in these cells, the long way, with the present table's states."""
    table = output.table
    h_row, h_column = output.halves(hidden, target)
    rows = -output.row_logits(h_row).log_softmax(1)
    columns = -output.column_logits(h_column).log_softmax(1)
    row, column = cells[target] // table.columns, cells[target] % table.columns
    each = torch.arange(len(target))
    return float((rows[each, row] + columns[each, column]).sum().detach())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dense_bytes", [1 << 20, 0])
def test_the_new_table_costs_what_the_sums_say_and_less_than_any_other(dense_bytes: int, tied: bool) -> None:
    embedding = TwoComponentEmbedding(WordTable.random(CLASSES), WIDTH)
    output = layer(embedding=embedding if tied else None)
    output.train(dense_bytes > 0)
    learner = TableLearner(output, embedding, dense_bytes=dense_bytes)
    hidden, target = samples()
    old = output.table
    before = float(output(hidden, target).loss.detach()) * len(target)
    found = learner.reallocate()
    assert output.table == embedding.table == found.table != old
    assert found.before == pytest.approx(before, rel=1e-5)
    output.table = old
    assert found.after == pytest.approx(cost(output, hidden, target, found.table.cells), rel=1e-5)
    drawn = torch.Generator().manual_seed(2)
    for _ in range(200):
        assert cost(output, hidden, target, torch.randperm(CLASSES, generator=drawn)) > found.after


def test_only_training_counts_and_what_is_ignored_does_not() -> None:
    output = layer(ignore_index=-1)
    learner = TableLearner(output)
    hidden, target = samples(6)
    target[:4] = -1
    output(hidden=hidden, target=target)
    assert learner.samples == 2
    output.eval()
    output(hidden, target)
    assert learner.samples == 2
    learner.close()
    output.train()
    output(hidden, target)
    assert learner.samples == 2


def test_factors_are_those_of_the_last_evaluation() -> None:
    output, (hidden, target) = layer(), samples()
    learner = TableLearner(output, dense_bytes=0)
    output.eval()
    output(hidden, target)
    output.train()
    output(hidden, target).loss.backward()
    with torch.no_grad():
        output.row_out += 0.5 * torch.randn_like(output.row_out)
    output.eval()
    loss = output(hidden, target).loss.detach()
    assert learner.samples == len(target)
    assert learner.reallocate().before == pytest.approx(float(loss) * len(target), rel=1e-5)


def test_without_samples_there_is_no_table() -> None:
    with pytest.raises(UnsupportedError, match=r"training mode count; call train\(\)"):
        TableLearner(layer()).reallocate()
    with pytest.raises(UnsupportedError, match=r"evaluation mode count; call eval\(\)"):
        TableLearner(layer(), dense_bytes=0).reallocate()
    with pytest.raises(MismatchError, match="different tables"):
        TableLearner(layer(), TwoComponentEmbedding(WordTable.random(CLASSES, seed=5), WIDTH))


def test_a_checkpoint_goes_on_with_table_and_costs() -> None:
    one, other = layer(), layer()
    first, second = TableLearner(one), TableLearner(other)
    for seed in (1, 2):
        one(*samples(seed=seed))
        if seed == 1:
            first.reallocate()
    second.load_state_dict(first.state_dict())
    assert other.table == one.table and second.samples == first.samples == 200
    assert second.reallocate().table == first.reallocate().table


def test_workers_learn_the_table_of_all_their_samples() -> None:
    alone = layer()
    learner = TableLearner(alone)
    alone(*samples(seed=0))
    alone(*samples(seed=1))
    wanted = learner.reallocate()

    def work() -> tuple[WordTable, float]:
        output = layer()
        optimizer = torch.optim.SGD(output.parameters(), lr=0.1)
        with paceline.attach(output, optimizer, "averaging(period=4)") as run:
            mine = TableLearner(output)
            output(*samples(seed=run.world.rank))
            found = mine.reallocate(run)
        return output.table, found.after

    (first, after), (second, unknown) = simulate(work, 2)
    assert first == second == wanted.table
    assert after == pytest.approx(wanted.after, rel=1e-5) and unknown != unknown


def test_a_learned_table_classifies_better() -> None:
    """Classes in groups: the group can be seen in the input. A table with a group a row makes it a matter of rows."""
    groups, members = 8, 8
    torch.manual_seed(0)
    table = WordTable.random(groups * members, groups, members)
    inputs = torch.randn(groups * members, 4 * WIDTH)
    inputs += 3 * torch.randn(groups, 4 * WIDTH).repeat_interleave(members, 0)

    def trained(learn: bool) -> float:
        torch.manual_seed(1)
        body, output = nn.Linear(4 * WIDTH, 4), TwoComponentSoftmax(table, 4)
        learner = TableLearner(output)
        optimizer = torch.optim.Adam([*body.parameters(), *output.parameters()], lr=0.03)
        for step in range(160):
            target = torch.randint(groups * members, (64,))
            loss = output(body(inputs[target] + 0.5 * torch.randn(64, 4 * WIDTH)), target).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if learn and step in (30, 60, 90):
                learner.reallocate()
        everything = torch.arange(groups * members)
        return float(output(body(inputs), everything).loss.detach())

    assert trained(True) < trained(False)
