# SPDX-License-Identifier: Apache-2.0
"""Loaders of other people's that never end, or say that they hardly will, with zero lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doors.zero.worlds import EVALUATION, passes, run_program, samples

HUGE = """
data = Numbers(24)
huge = RandomSampler(data, replacement=True, num_samples=int(1e10))
loader = DataLoader(data, sampler=huge, batch_size=2, num_workers={processes})
source = iter(loader)
seen.append([])
steps = len(loader)
for _ in range(6):
    model.train()
    k, x = next(source)
    train(k, x)
"""

REPEATED = """
class Repeat:
    def __init__(self, sampler):
        self.sampler = sampler
    def __iter__(self):
        while True:
            yield from iter(self.sampler)

class Epochs(DataLoader):
    "Keeps its iterator, and with it its processes, over all epochs."
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeat(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()
    def __len__(self):
        return len(self.batch_sampler.sampler)
    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

loader = Epochs(Numbers(24), batch_size=2, shuffle=True)
held_out = Epochs(Numbers(6), batch_size=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    model.train()
    seen.append([])
    for k, x in loader:
        train(k, x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
def test_a_sampler_of_ten_thousand_million(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    one, other = run_program(tmp_path, monkeypatch, HUGE.format(processes=processes))
    assert one["steps"] == other["steps"] == 25 * 10**8
    assert len(samples(one["seen"][0])) == len(samples(other["seen"][0])) == 12 and one["seen"] != other["seen"]


@pytest.mark.full
def test_a_loader_that_never_ends_and_says_itself_when_an_epoch_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_program(tmp_path, monkeypatch, REPEATED + EVALUATION)
    for epoch in range(3):
        assert sorted(k for one in passes(found) for k in samples(one[2 * epoch])) == list(range(24))
        assert all(samples(one[2 * epoch + 1]) == list(range(6)) for one in passes(found))
