# SPDX-License-Identifier: Apache-2.0
"""Messages of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from tests.helpers import sgd, simulate


def attached() -> paceline.Run:
    model = nn.Linear(2, 1)
    return paceline.attach(model, sgd(model.parameters()), "bmuf", period=4)


def test_a_ring() -> None:
    def program() -> tuple[float, list[Any], float, list[list[float]]]:
        run = attached()
        rank, size = run.world.rank, run.world.size
        got = torch.zeros(3)
        sending = run.messages.send(torch.full((3,), float(rank)), to=(rank + 1) % size)
        run.messages.receive(got, source=(rank - 1) % size).wait()
        sending.wait()
        said = run.messages.gather({"rank": rank})
        x = torch.tensor([float(rank + 1)])
        run.messages.all_reduce(x).wait()
        rows = torch.zeros(size, 2)
        run.messages.all_gather(rows, torch.tensor([float(rank), 1.0])).wait()
        run.messages.barrier()
        run.close()
        return float(got.sum()), said, float(x), rows.tolist()

    for rank, (got, said, total, rows) in enumerate(simulate(program, 3)):
        assert got == 3 * ((rank - 1) % 3)
        assert said == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert total == 6 and rows == [[0, 1], [1, 1], [2, 1]]


def test_not_to_oneself_and_not_beyond_the_end() -> None:
    def program() -> None:
        run = attached()
        for to in (run.world.rank, 2, -1):
            with pytest.raises(ValueError, match=r"name another one of 0 to 1"):
                run.messages.send(torch.zeros(1), to=to)
        run.close()

    simulate(program, 2)
