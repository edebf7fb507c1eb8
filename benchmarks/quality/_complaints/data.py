# SPDX-License-Identifier: Apache-2.0
"""Loaders: which samples are drawn, how often, by whom, and with which random numbers."""
# The bodies are scripts: they are written to a file and run, never called here.

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, random_split

from _complaints.cases import BOTH, EVERY, alike, as_alone, case, distinct, once, that
from _complaints.helpers import B, batches, flat, mse, net, note, points, train


@case("Lightning-AI/pytorch-lightning#7728", alike("held_out"), once("trained"), rules=BOTH)
def unseeded_split() -> None:
    """random_split without a seed: another split on each rank, so that one trains on the other's validation"""
    rest, held_out = random_split(points(), [40, 8])
    model = net()
    seen = train(model, SGD(model.parameters(), lr=0.05), DataLoader(rest, B, shuffle=True), 1)
    assert not set(seen) & set(held_out.indices)
    note(held_out=sorted(held_out.indices), trained=[0] * len(seen))


@case("huggingface/transformers#11254", once("trained"), rules=EVERY)
def stream_that_shuffles() -> None:
    """an IterableDataset that shuffles by itself: another order on each rank, so that samples come twice or never"""

    class Stream(IterableDataset):
        def __iter__(self):
            order = list(range(48))
            random.shuffle(order)
            return (points()[i] for i in order)

    model, seen = net(), []
    opt = SGD(model.parameters(), lr=0.05)
    for processes in (0, 1):
        seen += train(model, opt, DataLoader(Stream(), B, num_workers=processes), 1)
    note(trained=seen)


@case("meta-pytorch/data#358", once("trained"), rules=EVERY)
def stream_sharded_by_torch() -> None:
    """a pipe with a sharding_filter in a loader process, which torch's loader splits by rank where it sees a cluster"""
    from torch.utils.data.datapipes.iter import IterableWrapper

    model = net()
    pipe = IterableWrapper(range(48)).sharding_filter().map(points().__getitem__)
    note(trained=train(model, SGD(model.parameters(), lr=0.05), DataLoader(pipe, B, num_workers=1), 2))


@case("huggingface/datasets#7163", once("trained"), rules=BOTH, said="come twice or never")
def stream_shuffled_under_two_lines() -> None:
    """the same without a seed, with paceline's two lines"""
    import paceline

    class Stream(IterableDataset):
        def __iter__(self):
            order = list(range(48))
            random.shuffle(order)
            return (points()[i] for i in order)

    model = net()
    opt = SGD(model.parameters(), lr=0.05)
    with paceline.attach(model, opt) as run:
        note(trained=train(model, opt, run.share(DataLoader(Stream(), B)), 2))


@case("pytorch/pytorch#5059", distinct("drawn"), rules=BOTH)
def augmentation_in_loader_processes() -> None:
    """augmentation by numpy in loader processes: the same numbers in each of them, on each rank"""

    class Noisy(Dataset):
        def __len__(self):
            return 48

        def __getitem__(self, i):
            return (*points()[i][:2], int(np.random.randint(1 << 60)))

    model = net()
    loader = DataLoader(Noisy(), B, num_workers=2, shuffle=True)
    note(drawn=train(model, SGD(model.parameters(), lr=0.05), loader, 2))


@case("ContinualAI/avalanche#1287", once("trained"), rules=EVERY)
def data_that_grows() -> None:
    """a data set that grows between epochs (pseudo labels, replay): the new samples, each once"""

    class Growing(Dataset):
        size = 24

        def __len__(self):
            return self.size

        def __getitem__(self, i):
            return points()[i]

    data, model, seen = Growing(), net(), []
    opt, loader = SGD(model.parameters(), lr=0.05), DataLoader(data, B)
    for data.size in (24, 34, 44):
        seen += train(model, opt, loader, 1)
    note(trained=seen)


@case("xiangjjj/implicit_alignment#3", that(lambda n: n["steps"] == 28, "28 steps"), alike("saved"), rules=EVERY)
def iterator_by_hand() -> None:
    """next(iterator) for a number of steps, a new iterator at StopIteration, and then the model is saved"""
    model, loader, steps = net(), batches(shuffle=True), 0
    opt, stream = SGD(model.parameters(), lr=0.05), iter(loader)
    while steps < 28:
        try:
            batch = next(stream)
        except StopIteration:
            stream = iter(loader)
            continue
        train(model, opt, [batch], 1)
        steps += 1
    note(steps=steps, saved=[v.flatten().tolist() for v in model.state_dict().values()])


@case("huggingface/transformers#8859", alike("saved"), rules=BOTH)
def max_steps() -> None:
    """a number of steps that ends in the middle of an epoch: islice, then the state dictionary is read"""
    model, loader = net(), batches(shuffle=True)
    opt = SGD(model.parameters(), lr=0.05)
    for count in (3, 3, 4):
        train(model, opt, itertools.islice(loader, count), 1)
    note(w=flat(model), saved=[v.flatten().tolist() for v in model.state_dict().values()])


@case("leggedrobotics/rsl_rl#226", as_alone("mean", tolerance=1e-6), once("trained"), rules=BOTH)
def statistics_before_training() -> None:
    """the mean of the inputs from a pass over the training loader before training: of a part of the data"""
    loader, total, n, model = batches(shuffle=True), torch.zeros(4), 0, net()
    for x, _y, _i in loader:
        total, n = total + x.sum(0), n + len(x)
    opt = SGD(model.parameters(), lr=0.05)
    seen = train(model, opt, loader, 2, lambda x, y, i: mse(model(x - total / n), y))
    note(mean=[*(total / n).tolist(), n], trained=seen)


@case("pytorch/pytorch#57429", once("trained"), alike("w"), rules=EVERY, whole=False)
def broken_samples_dropped() -> None:
    """a collate function that leaves broken samples out, so that a batch has any size, or is None and is skipped"""

    def good(samples):
        fine = [s for s in samples if s[2] % 5 and not 8 <= s[2] < 12]
        return torch.utils.data.default_collate(fine) if fine else None

    model, seen = net(), []
    opt = SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for batch in batches(collate_fn=good):
            if batch is not None:
                seen += train(model, opt, [batch], 1)
    note(trained=seen, w=flat(model))


@case("huggingface/accelerate#2392", once("trained"), rules=BOTH)
def data_set_that_makes_batches() -> None:
    """batch_size=None: the data set makes the batches itself"""

    class Batches(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, k):
            return points()[slice(4 * k, 4 * k + 4)]

    model = net()
    note(trained=train(model, SGD(model.parameters(), lr=0.05), DataLoader(Batches(), batch_size=None), 2))
