# SPDX-License-Identifier: Apache-2.0
"""Streams between real processes: dealt, leased, and leased anew where a worker is killed in the middle of a shard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.update.server.durability import MOST
from tests.data.test_files import number_files
from tests.processes.launch import Launch, run
from tests.processes.stream_programs import KILLED

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
SIZES = [9, 40, 0, 13, 30, 21, 5, 40]


def everything() -> list[int]:
    return [100 * s + i for s, size in enumerate(SIZES) for i in range(size)]


def seen(folder: Path, rank: int, epoch: int) -> list[int]:
    rows = [json.loads(line) for line in (folder / f"seen.{rank}").read_text().splitlines()]
    return [i for one, batch in rows if one == epoch for i in batch]


@pytest.mark.parametrize("rule", ["sync", "asgd"])
@pytest.mark.parametrize("processes", [0, 2])
def test_every_sample_once(rule: str, processes: int, tmp_path: Path) -> None:
    number_files(tmp_path, SIZES)
    run("train", 2, tmp_path, rule, str(processes), "0", module="stream_programs")
    for epoch in range(2):
        assert sorted(i for rank in range(2) for i in seen(tmp_path, rank, epoch)) == everything()


def test_what_a_killed_worker_left_of_its_shard_is_done_by_others(tmp_path: Path) -> None:
    number_files(tmp_path, SIZES)
    with Launch("train", 3, tmp_path, "asgd", "0", "1", module="stream_programs") as launch:
        ended = launch.wait([0, 2])
        assert all(one.code == 0 for one in ended.values()), launch.said()
    for epoch in range(2):  # on a busy machine it may come so late that it dies in the second
        own = seen(tmp_path, KILLED, epoch)
        others = [i for rank in (0, 2) for i in seen(tmp_path, rank, epoch)]
        assert len(others) == len(set(others)) and sorted({*own, *others}) == everything()
        # made again: what no replica held yet; owners that have it pass it over (tests/update/server counts that)
        assert {*own} & {*others} <= {*own[-4 * MOST :]}
