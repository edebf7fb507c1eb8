# SPDX-License-Identifier: Apache-2.0
"""Everybody who holds the state dies, and fresh workers go on: the weights say which samples entered, how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devtools.counting.job import Job, Kill
from devtools.counting.play import Played, judged

from paceline.flow.control.messages import Terms
from tests.flow.cluster import Cluster, terms
from tests.nursery import nursery, surroundings

pytestmark = pytest.mark.processes


class Counted(Cluster):
    """Workers that train the counting model, each killed where the job says so; whoever dies is replaced."""

    def __init__(self, directory: Path, terms: Terms, kills: list[Kill], **more: Any) -> None:
        about = {"workers": 2, "samples": 96, "epochs": 2, "exchanges": 64, "checkpoint": str(directory / "steps")}
        self.job = Job(str(directory), kills=kills, **{**about, **more})
        self.path = str(self.job.write())
        super().__init__(directory, terms)

    def start(self, workers: int) -> None:
        for _ in range(workers):
            environment = {**surroundings(), "PACELINE_CONTROL": f"127.0.0.1:{self.control.port}"}
            out = self.file(len(self.children))
            what = "devtools.counting.program", [self.path], environment, self.directory
            self.children.append(nursery().start(*what, out, out))

    def to_the_end(self) -> Played:
        """Until two have ended well, and whoever died was replaced; what their weights say."""
        self.start(2)
        self.until(self._ended, "the run does not end")
        return judged(self.job, len(list(self.job.marks.iterdir())), 0.0)

    def _ended(self) -> bool:
        codes = [child.poll() for child in self.children]
        dead = sum(code not in (None, 0) for code in codes)
        assert dead <= 2 * len(self.job.kills), self.said()
        self.start(dead + 2 - len(codes))
        return codes.count(0) == 2


@pytest.mark.parametrize(
    ("kills", "more"),
    [
        ([Kill("step", 0, "all")], {"checkpoint": ""}),
        ([Kill("stepped", 1, "all")], {}),
        ([Kill("finished", 2, "all"), Kill("resume", 0, "all")], {}),
        ([Kill("finished", 2, "all"), Kill("attach")], {}),
        ([Kill("step", 1), Kill("finished", 0, "all")], {"every_blocks": 100}),
    ],
    ids=[
        "before anything counted",
        "before a step was written",
        "behind the first step, and as it is resumed",
        "behind the first step, and one of the fresh ones before it has resumed",
        "one below the minimum, and the other as it has saved because of that",
    ],
)
def test_all_die_in_the_first_epoch(tmp_path: Path, kills: list[Kill], more: dict[str, Any]) -> None:
    with Counted(tmp_path, terms(2, min_workers=2, max_workers=8), kills, **more) as cluster:
        assert cluster.to_the_end() == Played(len(kills), 0, 0, 0, 0.0), cluster.said()
