# SPDX-License-Identifier: Apache-2.0
"""Which caches stand behind a data set, and what the log says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset

import paceline
from paceline_plugins.data.cache import Cache, Files
from paceline_plugins.data.cache_log import CacheLog, caches_of
from tests.data.cache.server import Server
from tests.data.cache.test_files import first_byte


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


def values(path: Path) -> torch.Tensor:
    return torch.tensor([float(first_byte(path))])


def test_caches_are_found_in_data_sets_made_of_others(tmp_path: Path) -> None:
    one, two = Cache(tmp_path / "one"), Cache(tmp_path / "two")
    files, others = Files(["http://a/1", "http://a/2"], one), Files(["http://b/1", "http://b/2"], two)
    assert caches_of(files) == [one]
    assert caches_of(Subset(files, [1])) == [one]
    assert set(caches_of(ConcatDataset([files, Subset(others, [0]), files]))) == {one, two}
    assert set(caches_of(StackDataset(files, others))) == {one, two}
    assert set(caches_of(StackDataset(x=others, y=files))) == {one, two}
    assert caches_of(DataLoader(Subset(files, [0]))) == [one]  # what is shared may be made of a loader
    one.close()
    two.close()


def test_totals_are_told_when_they_have_changed_and_at_most_so_often(server: Server, tmp_path: Path) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    often, seldom = (CacheLog(lambda kind, **fields: told.append((kind, fields)), every_s) for every_s in (0.0, 1e9))
    with Cache(tmp_path) as cache:
        files = Files([server.put("a", b"hello")], cache)
        for sources in (often, seldom):
            sources.add(files)
            sources.add(Subset(files, [0]))
            sources.tell()
        assert told == []  # there is nothing to say
        assert files[0] == files[0] == b"hello"
        seldom.tell()
        assert told == []  # it is not time yet
        often.tell()
        often.tell()
        (event,) = told
        seldom.tell(now=True)
        assert told == [event, event]
    kind, fields = event
    assert kind == "cache" and fields["directory"] == str(tmp_path)
    row = fields["sources"][server.address]
    assert row.pop("waited_s") > 0
    assert row == {"hits": 1, "misses": 1, "bytes": 5, "retries": 0, "corrupt": 0}


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_run_writes_down_waits_and_sources(server: Server, tmp_path: Path) -> None:
    """With one worker, a loader with two processes and a source that damages a download."""
    urls = [server.put(str(i), bytes([i])) for i in range(8)]
    server.fail("3", "flip")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with Cache(tmp_path / "cache") as cache, paceline.attach(model, optimizer, log=tmp_path / "log") as run:
        dataset: Dataset[Any] = Files(urls, cache, values)
        loader = run.share(DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork"))
        for _ in range(2):
            for x in loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
    events = [json.loads(line) for line in (tmp_path / "log" / "rank-000.jsonl").read_text().splitlines()]
    lines = [event for event in events if event["kind"] == "exchange"]
    assert sum(line["minibatches"] for line in lines) == 8
    assert sum(line["data_s"] for line in lines) > 0
    row = [event for event in events if event["kind"] == "cache"][-1]["sources"][server.address]
    assert row.pop("waited_s") > 0
    assert row.pop("hits") + row.pop("misses") == 16  # how many were there in time is a matter of time
    assert row == {"bytes": 9, "retries": 1, "corrupt": 1}
