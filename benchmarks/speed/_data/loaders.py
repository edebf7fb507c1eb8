# SPDX-License-Identifier: Apache-2.0
"""Samples per second of loaders with samples of 1 KB, in the training process and with one loader process.

Every row loads 20,000 samples in batches of 16, shuffled where the loader can, and is timed from the start of the pass
to its last batch, the start of processes included. The rows of a round follow each other; the bare `DataLoader` and
ours, whose passes in process are short, take turns five times in it. A ratio is the median over all such turns of
ours by the bare one. Ours is worker 0 of 4 over four times the samples, so that it loads as many. Peers that are not
installed, or fail, give the reason.
"""

from __future__ import annotations

import io
import statistics
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _workers import is_quick
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, VALUES, WORKERS = 2_000 if is_quick() else 20_000, 16, 256, 4
PLACES = {"in_process": 0, "one_process": 1}
TURNS = {"in_process": 5, "one_process": 1}
Row = Callable[[int], Iterable[Any]]  # from a number of loader processes to the batches of one pass


class Vectors(Dataset[Any]):
    """Rows of 1 KB, in memory; however many samples, the memory is that of 20,000."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples
        self._rows = torch.arange(SAMPLES * VALUES, dtype=torch.float32).view(SAMPLES, VALUES)  # (20,000, 256)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index % SAMPLES]


class Arrays:
    """The same as NumPy arrays, for Grain."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return np.full(VALUES, index, dtype=np.float32)


def ours() -> Row:
    """What `run.share` gives to worker 0 of 4."""
    from paceline.core.world import World
    from paceline.data import LoaderRegistry

    data = Vectors(WORKERS * SAMPLES)

    def row(processes: int) -> Iterable[Any]:
        feed = LoaderRegistry(World(0, WORKERS), 0, lambda epoch, batches: None)
        return feed.share(DataLoader(data, BATCH, shuffle=True, num_workers=processes))

    return row


def bare() -> Row:
    """PyTorch's own."""
    data = Vectors()
    return lambda processes: DataLoader(data, BATCH, shuffle=True, num_workers=processes)


def stateful(_: Path) -> Row:
    """torchdata's StatefulDataLoader."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = Vectors()
    return lambda processes: StatefulDataLoader(data, BATCH, shuffle=True, num_workers=processes)


def litdata(folder: Path) -> Row:
    """litdata over its own format on local disk."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    data, place = Vectors(), folder / "litdata"
    place.mkdir()
    writer = BinaryWriter(str(place), chunk_bytes="4MB")
    for index in range(SAMPLES):
        writer[index] = data[index]
    writer.done()
    writer.merge()
    return lambda processes: StreamingDataLoader(
        StreamingDataset(str(place), shuffle=True), batch_size=BATCH, num_workers=processes
    )


def grain(_: Path) -> Row:
    """Grain over arrays in memory, with its usual threads."""
    import grain.python as pygrain

    def row(processes: int) -> Iterable[Any]:
        data = pygrain.MapDataset.source(Arrays()).seed(0).shuffle().batch(BATCH).to_iter_dataset()
        return data.mp_prefetch(pygrain.MultiprocessingOptions(num_workers=1)) if processes else data

    return row


def webdataset(folder: Path) -> Row:
    """WebDataset over one local tar of .npy files, in the order of the tar."""
    import webdataset as wds

    name = folder / "vectors.tar"
    with tarfile.open(name, "w") as tar:
        for index in range(SAMPLES):
            content = io.BytesIO()
            np.save(content, np.full(VALUES, index, dtype=np.float32))
            entry = tarfile.TarInfo(f"{index:06d}.npy")
            entry.size = content.tell()
            content.seek(0)
            tar.addfile(entry, content)

    def row(processes: int) -> Iterable[Any]:
        data = wds.WebDataset(str(name), shardshuffle=False).decode().to_tuple("npy").batched(BATCH)
        return wds.WebLoader(data, batch_size=None, num_workers=processes)

    return row


PEERS: dict[str, Callable[[Path], Row]] = {
    "stateful": stateful,
    "litdata": litdata,
    "grain": grain,
    "webdataset": webdataset,
}


def samples_per_second(row: Row, processes: int) -> float:
    """One pass, and a check that it was a whole one."""
    began = time.perf_counter()
    count = sum(len(batch[0]) if isinstance(batch, (list, tuple)) else len(batch) for batch in row(processes))
    seconds = time.perf_counter() - began
    if count != SAMPLES:
        raise ValueError(f"a pass gave {count} samples instead of {SAMPLES}")
    return SAMPLES / seconds


def peers(folder: Path, names: Iterable[str]) -> tuple[dict[str, Row], dict[str, str]]:
    """(the peers that work here, for the others the reason why not)."""
    rows, missing = {}, {}
    for name in names:
        try:
            row = PEERS[name](folder)
            for processes in PLACES.values():
                samples_per_second(row, processes)
            rows[name] = row
        except Exception as error:  # whatever a library does that does not fit this machine
            missing[name] = f"{type(error).__name__}: {error}"[:200]
    return rows, missing


def measure(rounds: int = 5, names: Iterable[str] = tuple(PEERS)) -> dict[str, Any]:
    """Rates and ratios.

    Returns:
        `in_process` and `one_process`: ours by the bare DataLoader, median over the turns; `rates`: samples per
        second of each row in each place, medians; `missing`: why a peer has no row.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others, missing = peers(Path(folder), names)
        rows = {"bare": bare(), "ours": ours(), **others}
        found: dict[str, dict[str, list[float]]] = {name: {place: [] for place in PLACES} for name in rows}
        for _ in range(rounds):
            for place, processes in PLACES.items():
                for name in ["bare", "ours"] * TURNS[place] + list(others):
                    found[name][place].append(samples_per_second(rows[name], processes))
    rates = {name: {place: round(statistics.median(f[place])) for place in PLACES} for name, f in found.items()}
    ratios = {
        place: statistics.median(a / b for a, b in zip(found["ours"][place], found["bare"][place], strict=True))
        for place in PLACES
    }
    return {**ratios, "rates": rates, "missing": missing}
