# SPDX-License-Identifier: Apache-2.0
"""Small sources and a fake cache for the tests of packed data."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline_plugins.data.packed import PackedDataset, open_source, pack
from paceline_plugins.data.packed.index import Index


def folder(root: Path, samples: int = 20, seed: int = 0) -> dict[str, dict[str, bytes]]:
    """Write samples of two classes; key -> members, without source.json."""
    rng = random.Random(seed)
    made = {}
    for number in range(samples):
        key = f"{('cat', 'dog')[number % 2]}/{number:04d}"
        members = {"jpg": rng.randbytes(rng.randrange(2000)), "txt": str(number).encode()}
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        for extension, data in members.items():
            (root / f"{key}.{extension}").write_bytes(data)
        made[key] = members
    return made


def packed(root: Path, samples: int = 20, shard_bytes: int = 12_000) -> Path:
    """A packed data set of several shards."""
    folder(root / "source", samples)
    pack(open_source(str(root / "source")), root / "packed", shard_bytes=shard_bytes)
    return root / "packed"


def back(folder: Path) -> list[dict[str, bytes]]:
    """All samples."""
    data = PackedDataset(folder)
    return [data[number] for number in range(len(data))]


def by_key(samples: Iterable[dict[str, bytes]]) -> dict[str, dict[str, bytes]]:
    """Samples by their names in the source."""
    found = {}
    for sample in samples:
        key = json.loads(sample["source.json"])["key"]
        assert key not in found
        found[key] = {name: data for name, data in sample.items() if name != "source.json"}
    return found


def index_of(folder: Path) -> Index:
    """Its index."""
    return Index.from_json((folder / "index.json").read_bytes(), str(folder))


class FakeCache:
    """A fake cache: remote files lie in a local directory, and every use is recorded."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url, self.directory = url, directory
        self.opened: list[str] = []
        self.prefetched: list[str] = []
        self.inside = 0

    @contextlib.contextmanager
    def open(self, url: str, sha256: str | None = None) -> Iterator[Path]:
        """The file, if its checksum is right."""
        assert url.startswith(self.url + "/")
        path = self.directory / url.removeprefix(self.url + "/")
        assert sha256 is None or hashlib.sha256(path.read_bytes()).hexdigest() == sha256
        self.opened.append(path.name)
        self.inside += 1
        try:
            yield path
        finally:
            self.inside -= 1

    def prefetch(self, urls: Iterable[str]) -> None:
        """Only recorded."""
        self.prefetched = list(urls)
