# SPDX-License-Identifier: Apache-2.0
"""Batches of samples of similar length, for data that are padded to the longest sample of a batch, such as speech.

Samples are sorted into buckets by length. Each epoch shuffles every bucket, concatenates the buckets, and cuts the
result into batches. The cuts depend on the lengths alone, so the number of batches is the same in every epoch; which
samples share a batch is not.

In a synchronous step all workers wait for the longest batch, so the batches of one step should be of similar length
too: :meth:`BucketBatches.for_workers` yields them in groups of N neighbours, which `run.share` uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler

from paceline.data.sampling.split import even_parts

Lengths = NDArray[np.int64]

BATCHES_OF_A_BUCKET = 8
MOST_BUCKETS = 100


class BucketBatches(Sampler[list[int]]):
    """A batch sampler: every sample once an epoch, in batches of similar length.

    ::

        sampler = paceline.data.BucketBatches(lengths, most=60_000)
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=pad, num_workers=4)
        for batch in run.share(loader): ...

    >>> from paceline.data import BucketBatches
    >>> list(BucketBatches([5, 1, 4, 2], most=10, buckets=[2, 5], shuffle=False))  # samples, by their numbers
    [[1, 3], [2, 0]]

    At least one of `batch_size` and `most` is needed; with both, both hold. The order is drawn from torch's global
    generator, as that of `shuffle=True` is.

    Args:
        lengths: of every sample of the data set, shape (n,): whole numbers, 0 or more (frames, tokens, pixels).
        batch_size: samples of a batch, at most.
        most: padded units of a batch, at most: its longest sample times its number of samples.
        buckets: how many buckets of about equal size; or the greatest length of each bucket, ascending (longer samples
            make one more). Few buckets mix better, many pad less. The default is about 8 batches a bucket, and
            at most 100 buckets.
        shuffle: without it, samples and batches come from short to long.
        drop_last: leave out the last (longest) batch if it is smaller than it could be; with several workers, also the
            batches that do not make one for each, rather than cut them.

    Raises:
        ValueError: there are no lengths, one is negative or no whole number, or one sample is longer than `most`.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any] | Tensor,
        batch_size: int | None = None,
        most: int | None = None,
        buckets: int | Sequence[int] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self._lengths = _whole_numbers(lengths)
        self._samples = _positive(batch_size, "batch_size") if batch_size is not None else len(self._lengths)
        if batch_size is None and most is None:
            raise ValueError("neither batch_size nor most is given; say how large a batch may be")
        if most is not None:
            _positive(most, "most")
            longest = int(self._lengths.argmax())
            if self._lengths[longest] > most:
                raise ValueError(
                    f"sample {longest} has length {self._lengths[longest]}, and a batch may have {most} padded units "
                    "at most; raise most, or leave out samples that are so long"
                )
        self._shuffle, self.drop_last = shuffle, drop_last
        self._row = np.argsort(self._lengths, kind="stable")  # samples from short to long
        self._bounds = self._bucket_bounds(buckets, most)
        greatest = np.zeros(len(self._row), dtype=np.int64)  # length in the bucket of each place in the row
        for begin, end in self._bounds:
            greatest[begin:end] = self._lengths[self._row[end - 1]]
        self._cuts = self._cut(greatest, most)
        begin, end = self._cuts[-1]
        room = most is None or (end - begin + 1) * int(greatest[-1]) <= most
        if drop_last and end - begin < self._samples and room:
            self._cuts.pop()

    def __len__(self) -> int:
        return len(self._cuts)

    def __iter__(self) -> Iterator[list[int]]:
        return self.for_workers(1)

    def for_workers(self, workers: int) -> Iterator[list[int]]:
        """The batches of an epoch in groups of `workers` neighbours in length, the groups in random order.

        The batches depend on the random state alone, not on `workers`. If their number is not a multiple of `workers`,
        the last group is smaller; it is drawn from anywhere in the row.
        """
        row = self._row.copy()
        numbers: Sequence[int] = range(len(self._cuts))
        if self._shuffle:
            generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
            for begin, end in self._bounds:
                row[begin:end] = row[begin:end][torch.randperm(end - begin, generator=generator).numpy()]
            numbers = _grouped(len(self._cuts), workers, generator)
        for number in numbers:
            begin, end = self._cuts[number]
            batch: list[int] = row[begin:end].tolist()
            yield batch

    def _bucket_bounds(self, buckets: int | Sequence[int] | None, most: int | None) -> list[tuple[int, int]]:
        """begin .. end (excl.) of every bucket in the row; no bucket is empty."""
        count = len(self._row)
        if buckets is None:
            batches = -(-count // self._samples)
            if most is not None:
                batches = max(batches, -(-int(self._lengths.sum()) // most))
            buckets = min(MOST_BUCKETS, -(-batches // BATCHES_OF_A_BUCKET))
        if isinstance(buckets, int):
            return even_parts(count, min(count, _positive(buckets, "buckets")))
        limits = np.asarray(buckets)
        if len(limits) == 0 or (limits[1:] <= limits[:-1]).any():
            raise ValueError(f"buckets must be a number, or lengths that grow, got {list(buckets)}")
        ends = np.searchsorted(self._lengths[self._row], limits, side="right").tolist()
        edges = sorted({0, *ends, count})
        return list(pairwise(edges))

    def _cut(self, longest: Lengths, most: int | None) -> list[tuple[int, int]]:
        """begin .. end (excl.) of every batch in the row, each as large as allowed."""
        cuts, begin = [], 0
        while begin < len(longest):
            end = min(len(longest), begin + self._samples)
            if most is not None:  # lengths ascend, so the samples that fit are a prefix
                end = min(end, begin + most // max(1, int(longest[begin])))
                sizes = np.arange(1, end - begin + 1) * longest[begin:end]
                end = begin + int(np.searchsorted(sizes, most, side="right"))
            cuts.append((begin, end))
            begin = end
        return cuts


def _grouped(count: int, size: int, generator: torch.Generator) -> list[int]:
    """0 .. count in groups of `size` neighbours; shuffles the groups, and the numbers inside each."""
    groups, rest = divmod(count, size)
    odd = int(torch.randint(groups + 1, (), generator=generator))  # where the incomplete group is in the row
    starts = [k * size + (rest if k >= odd else 0) for k in torch.randperm(groups, generator=generator).tolist()]
    shuffled = [start + k for start in starts for k in torch.randperm(size, generator=generator).tolist()]
    return shuffled + [odd * size + k for k in torch.randperm(rest, generator=generator).tolist()]


def _whole_numbers(lengths: Sequence[int] | NDArray[Any] | Tensor) -> Lengths:
    array: NDArray[Any] = np.asarray(lengths.detach().cpu() if isinstance(lengths, Tensor) else lengths)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"lengths must be one number for each sample, got shape {array.shape}; is the data set empty?")
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all() or (array != np.floor(array)).any():
        raise ValueError(f"lengths must be whole numbers, got {array.dtype}; round them up")
    if (array < 0).any():
        first = int((array < 0).argmax())
        raise ValueError(f"sample {first} has length {array[first]}; lengths must be 0 or more")
    whole: Lengths = array.astype(np.int64)
    return whole


def _positive(value: int, name: str) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")
    return int(value)
