# SPDX-License-Identifier: Apache-2.0
"""Splits that a program draws without a seed are the same on all workers, or it is refused before it trains."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, TensorDataset

from paceline_plugins.zero import seeds
from paceline_plugins.zero.agreement import fingerprint
from paceline_plugins.zero.patches import Patches
from paceline_plugins.zero.rank_discovery import ZeroWorker
from paceline_plugins.zero.refusals import Refusal
from paceline_plugins.zero.seeds import Streams
from tests.doors.zero.programs import each, forgotten, virtual
from tests.doors.zero.test_run import paceline_run

SPLITS = """
    import json
    import random
    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

    data = TensorDataset(torch.arange(24), torch.arange(24.0).reshape(24, 1))
    part, rest = random_split(data, [16, 8])
    words = [f"file{n}" for n in range(24)]
    shuffled = list(range(24))
    random.shuffle(shuffled)
    torch.seed()
    drawn = {
        "random_split": list(rest.indices),
        "random": shuffled,
        "numpy": np.random.permutation(24).tolist(),
        "default_rng": np.random.default_rng().permutation(24).tolist(),
        "RandomState": np.random.RandomState().permutation(24).tolist(),
        "PCG64": np.random.Generator(np.random.PCG64()).permutation(24).tolist(),
        "Random": random.Random().sample(range(24), 24),
        "torch.seed": torch.randperm(24).tolist(),
        "set": list(set(words)),
        "hash": [hash(word) for word in words],
    }
    np.random.seed()
    random.seed()
    drawn["seed()"] = [np.random.rand(), random.random()]
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noise = []
    for epoch in range(2):
        for numbers, x in DataLoader(part, batch_size=4, shuffle=True):
            noise.append([torch.rand(1).item(), random.random(), np.random.rand(), np.random.default_rng().random()])
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        drawn[f"after {epoch}"] = [torch.rand(1).item(), random.random(), np.random.rand()]
        drawn[f"made after {epoch}"] = np.random.default_rng().random()
    with open("drawn.json", "w") as file:
        json.dump({"drawn": drawn, "noise": noise}, file)
"""


def both(folder: Path, name: str) -> list[Any]:
    """What rank 0 and rank 1 wrote."""
    return [json.loads(path.read_text()) for path in each(folder, name)]


@pytest.mark.slow
@pytest.mark.processes
def test_what_is_drawn_without_a_seed_is_the_same_on_two_workers(tmp_path: Path) -> None:
    done = paceline_run(tmp_path, SPLITS, "--workers", "2", "--rule", "averaging(period=4)")
    assert done.returncode == 0, done.stderr
    first, second = both(tmp_path, "drawn.json")
    assert first["drawn"] == second["drawn"]
    alike = [
        a for one, other in zip(first["noise"], second["noise"], strict=True) for a in zip(one, other, strict=True)
    ]
    assert all(a != b for a, b in alike) and len(alike) == 16
    assert len({tuple(row) for row in first["noise"]}) == 4  # no pass draws what another has drawn


TRAINING = """
    import random
    import threading
    import time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

    data = TensorDataset(torch.arange(24.0).reshape(24, 1))
    order = list(range(24))
    DRAW
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (x,) in LOADER:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("draw", "loader", "says"),
    [
        (
            "random.SystemRandom().shuffle(order)",
            "DataLoader(Subset(data, order[:16]), batch_size=4)",
            "not the same on all workers: 16 samples with sum",
        ),
        (
            "random.SystemRandom().shuffle(order)",
            "DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(order[:16]))",
            "not the same on all workers: 24 samples with sum",
        ),
        (
            "threading.n = getattr(threading, 'n', 0) + 1; data = TensorDataset(data.tensors[0][: 16 + threading.n])",
            "DataLoader(data, batch_size=4)",
            "on rank 0, ",
        ),
        (
            "torch.manual_seed(time.perf_counter_ns())",
            "DataLoader(data, batch_size=4)",
            "the random generators of torch stand elsewhere on rank 1 than on rank 0",
        ),
    ],
)
def test_data_that_differ_between_workers_are_refused(draw: str, loader: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"train.py:\d+: the ") as caught:
        virtual(tmp_path, TRAINING.replace("DRAW", draw).replace("LOADER", loader))
    assert says in str(caught.value)


def test_folds_that_are_drawn_between_phases_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import json
        import numpy as np
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, Subset, TensorDataset

        data = TensorDataset(torch.arange(24.0).reshape(24, 1))
        folds = []
        for fold in range(3):
            order = np.random.default_rng().permutation(24)
            torch.rand(fold)
            more = torch.randperm(24)
            model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for (x,) in DataLoader(Subset(data, order[:16]), batch_size=4, shuffle=True):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            folds.append([order.tolist(), more.tolist()])
        with open("folds.json", "w") as file:
            json.dump(folds, file)
    """
    monkeypatch.chdir(tmp_path)
    virtual(tmp_path, source)
    first, second = both(tmp_path, "folds.json")
    assert first == second and len({str(fold) for fold in first}) == 3


def drawn() -> list[float]:
    return [torch.rand(1).item(), random.random(), np.random.rand()]


def test_what_is_drawn_in_training_is_a_workers_own_and_leaves_no_trace() -> None:
    found = []
    for rank in (0, 1):
        with forgotten(), Patches() as patches:
            streams = Streams(5, ZeroWorker(rank, 2, 0, None, False))
            streams.install(patches)
            rows = [drawn()]
            for _ in range(2):
                streams.enter()
                streams.enter()  # a second loader beside it
                rows.append(drawn())
                streams.leave()
                rows.append(drawn())
                streams.leave()
            rows.append(drawn())
            found.append(rows)
    ours, theirs = found
    assert ours[0] == theirs[0] and ours[-1] == theirs[-1]
    assert all(a != b for k in range(1, 5) for a, b in zip(ours[k], theirs[k], strict=True))
    assert len({tuple(row) for row in ours}) == len(ours)


def test_a_generator_that_the_program_seeds_repeats_whatever_it_leaves_unseeded() -> None:
    found = []
    for launch in (5, 6):
        with forgotten(), Patches() as patches:
            streams = Streams(launch, ZeroWorker(1, 2, 0, None, False))
            streams.install(patches)
            torch.manual_seed(3)
            streams.enter()
            found.append(drawn())
            streams.leave()
    assert found[0][0] == found[1][0] and found[0][1:] != found[1][1:]


def test_a_pass_that_outlives_its_program_moves_no_generator(tmp_path: Path) -> None:
    source = """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        under_way = iter(DataLoader(TensorDataset(torch.ones(24, 1)), batch_size=4, shuffle=True))
        (x,) = next(under_way)
        model(x).sum().backward()
        optimizer.step()
        raise LookupError("in the midst of a pass")
    """
    with pytest.raises(LookupError) as caught:
        virtual(tmp_path, source)
    before = seeds.positions()
    del caught  # and the frames with it, which hold the pass
    gc.collect()
    assert seeds.positions() == before


def test_seeds_of_the_program_are_what_it_says() -> None:
    def seeded() -> list[float]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        return [*drawn(), np.random.default_rng(3).random(), random.Random(3).random(), np.random.RandomState(3).rand()]

    with forgotten():
        plain = seeded()
    with forgotten(), Patches() as patches:
        Streams(5, ZeroWorker(1, 2, 0, None, False)).install(patches)
        assert seeded() == plain


def loader(data: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=4, **settings)


def test_what_a_fingerprint_sees_and_what_it_does_not() -> None:
    class Files(torch.utils.data.Dataset[Any]):
        def __init__(self, folder: str, names: list[str], extra: Any = None) -> None:
            self.samples = [(f"{folder}/{name}", n) for n, name in enumerate(names)]
            self.extra = extra

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, n: int) -> Any:
            return n

    data = TensorDataset(torch.arange(12.0))
    apart = [
        loader(data),
        loader(TensorDataset(torch.arange(12.0).flip(0))),
        loader(TensorDataset(torch.arange(13.0))),
        loader(Subset(data, [1, 2, 3])),
        loader(Subset(data, [1, 3, 2])),
        loader(Subset(data, np.array([1, 2, 4]))),  # type: ignore[arg-type]
        loader(ConcatDataset([data, Subset(data, [5])])),
        loader(ConcatDataset([data, Subset(data, [6])])),
        loader(data, sampler=SubsetRandomSampler([1, 2])),
        loader(data, sampler=SubsetRandomSampler([1, 3])),
        loader(Files("a", ["x", "y"])),
        loader(Files("a", ["y", "x"])),
        loader([1, 2, 3]),
        loader([1, 2, 4]),
        loader(["some", "words"]),
        loader(["words", "some"]),
    ]
    assert len({fingerprint(one) for one in apart}) == len(apart)
    assert fingerprint(loader(Files("a", ["x"]))) == fingerprint(loader(Files("/else/b", ["x"], extra={3: object()})))
    assert fingerprint(loader(Subset(data, [1, 2]))) == fingerprint(
        loader(Subset(TensorDataset(torch.arange(12.0)), [1, 2]))
    )
    later = [fingerprint(loader(one), contents=False) for one in (data, TensorDataset(torch.arange(12.0).flip(0)))]
    assert later[0] == later[1] != fingerprint(loader(Subset(data, [1])), contents=False)


STREAM = """
    import json
    import random
    import numpy as np
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset):
        "Shuffles by itself, and in a buffer beside what it yields."
        def __iter__(self):
            order = torch.randperm(24).tolist()
            random.shuffle(order)
            order = [order[k] for k in np.random.default_rng().permutation(24)]
            random.Random().shuffle(order)
            buffer = order[:6]
            for k in order[6:]:
                at = np.random.randint(6)
                yield torch.tensor([float(buffer[at])])
                buffer[at] = k
            yield from (torch.tensor([float(k)]) for k in buffer)

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    passes, noise = [], []
    for epoch in range(3):
        passes.append([])
        for x in DataLoader(Stream(), batch_size=2, num_workers=PROCESSES):
            passes[-1] += x.flatten().tolist()
            noise.append(torch.rand(1).item())
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    with open("passes.json", "w") as file:
        json.dump([passes, noise, torch.rand(1).item()], file)
"""


@pytest.mark.parametrize("rule", ["sync", "averaging(period=2)", "asgd"])
def test_a_stream_that_shuffles_by_itself_gives_each_sample_once(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_RULE", rule)
    virtual(tmp_path, STREAM.replace("PROCESSES", "0"))
    (first, noise, after), (second, other, after_too) = both(tmp_path, "passes.json")
    for one, two in zip(first, second, strict=True):
        assert sorted(one + two) == list(range(24))
    assert len({tuple(one + two) for one, two in zip(first, second, strict=True)}) == 3  # another order each time
    assert not set(noise) & set(other) and after == after_too


RANDOM_DATA = """
    import json
    import random
    import numpy as np
    import torch
    from torch import nn

    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    x = torch.randn(64, 3)
    y = x @ torch.tensor(np.random.rand(3, 1), dtype=torch.float32)
    noise = [random.random(), np.random.rand(), np.random.default_rng(3).random(), torch.rand(1).item()]
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.dropout = nn.Dropout(0.5)
        def forward(self, x=None):
            return self.dropout(self.layer(self.layer.bias.new_ones(1, 3) if x is None else x))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    drawn = []
    for step in range(10):
        SAMPLES
        drawn.append([*at] if at is not None else None)
        optimizer.zero_grad()
        loss = CALL.square().mean()
        loss.backward()
        optimizer.step()
    with open("drawn.json", "w") as file:
        json.dump([x.tolist(), y.tolist(), noise, drawn], file)
"""
AT = "(model(x[at]) - y[at])"
DRAWS = {
    "torch": ("at = torch.randint(64, (4,)).tolist()", AT),
    "NumPy": ("at = np.random.randint(64, size=4).tolist()", AT),
    "Python": ("at = random.sample(range(64), 4)", AT),
    "a seed a step": ("torch.manual_seed(step); at = torch.randint(64, (4,)).tolist()", AT),
    "default_rng(step)": ("at = np.random.default_rng(step).integers(64, size=4).tolist()", AT),
    "a fixed beginning": ("at = [0, 1] if step % 3 == 0 else torch.randint(64, (2,)).tolist()", AT),
    "by keyword": ("at = torch.randint(64, (4,)).tolist()", AT.replace("model(", "model(x=")),
}
ALIKE = {
    "in order": ("at = range(step * 4, step * 4 + 4)", AT),
    "all at once": ("at = range(64)", AT),
    "all at once, by keyword": ("at = range(64)", AT.replace("model(", "model(x=")),
    "a Generator of its own": (
        "at = torch.randint(64, (4,), generator=torch.Generator().manual_seed(step)).tolist()",
        AT,
    ),
}


def _random_data(samples: str, call: str) -> str:
    return RANDOM_DATA.replace("SAMPLES", samples).replace("CALL", call)


@pytest.mark.parametrize("draws", DRAWS)
def test_random_samples_are_a_workers_own_and_its_data_are_not(
    draws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, workers in (("alone", 1), ("together", 3)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setenv("PACELINE_RULE", "averaging(period=2)")
        virtual(tmp_path / name, _random_data(*DRAWS[draws]), workers, random_data=True)
        found += [json.loads(path.read_text()) for path in each(tmp_path / name, "drawn.json", workers)]
    alone, first, *others = found
    assert first == alone
    for other in others:
        assert other[:3] == alone[:3]
    steps = range(2, 10)  # the first samples may be drawn before the model is called
    assert all(len({str(one[3][step]) for one in (first, *others)}) > 1 or "fixed" in draws for step in steps)
    assert len({str(one[3]) for one in (first, *others)}) == 3


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=2)", "asgd"])
@pytest.mark.parametrize("draws", ALIKE)
def test_equal_samples_on_all_workers_are_refused(
    draws: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_RULE", rule)
    monkeypatch.chdir(tmp_path)
    said = r"train.py:\d+: workers 0 and 1 trained on the same samples in each of 8 steps"
    with pytest.raises(Refusal, match=said):
        virtual(tmp_path, _random_data(*ALIKE[draws]), random_data=True)
    with pytest.raises(Refusal, match="in each of 3 steps"):  # the program is over
        virtual(tmp_path, _random_data(*ALIKE[draws]).replace("range(10)", "range(3)"), random_data=True)


def test_generators_that_a_program_holds_become_a_workers_own() -> None:
    found = []
    for rank in (None, 0, 1, 2):
        made = np.random.default_rng(1), np.random.RandomState(1), random.Random(1), torch.Generator().manual_seed(1)
        order = DataLoader(TensorDataset(torch.ones(4)), shuffle=True, generator=torch.Generator().manual_seed(1))
        with forgotten(), Patches() as patches:
            if rank is not None:
                streams = Streams(5, ZeroWorker(rank, 3, 0, None, True))
                streams.install(patches)
                streams.part()
            one, two, three, four = made
            found.append([one.random(), two.rand(), three.random(), torch.rand(1, generator=four).item()])
            assert order.generator.initial_seed() == 1  # the workers share the order of a loader
    assert found[0] == found[1]
    assert all(len(set(values)) == 3 for values in zip(*found, strict=True))
