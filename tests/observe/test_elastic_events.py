# SPDX-License-Identifier: Apache-2.0
"""What the control plane of an elastic run told: as a standing, in words, on the page and in the status line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.run.status import describe
from paceline.observe.reports.elastic_events import ControlEvent, ElasticStatus, event_text
from paceline.observe.reports.live import Live, LiveSnapshot
from paceline.observe.reports.read import read_run
from paceline_plugins.report.totals import warnings
from paceline_plugins.sites.elastic_messages import of_control

MEMBERS = [[0, "a", "10.0.0.1", 1], [2, "b", "10.0.0.2", 1]]
STORY: list[dict[str, Any]] = [
    {"kind": "began", "at_s": 0.1, "fewest": 2, "most": 8, "control": "a:1", "again": False},
    {"kind": "joined", "at_s": 1.0, "worker": 0, "host": "a"},
    {"kind": "joined", "at_s": 1.1, "worker": 1, "host": "a"},
    {"kind": "joined", "at_s": 1.2, "worker": 2, "host": "b"},
    {"kind": "holds", "at_s": 1.3, "worker": 2, "exchange": 0},
    {"kind": "lost", "at_s": 7.0, "worker": 1, "host": "a", "why": "its connection closed"},
    {"kind": "generation", "at_s": 7.1, "number": 3, "members": MEMBERS, "exchange": 9, "reason": "worker 1 was lost"},
    {"kind": "called", "at_s": 8.0, "worker": 2, "exchange": 10},
    {"kind": "paused", "at_s": 9.0, "reason": "1 of at least 2 workers are there"},
]


def tell(directory: Path, news_events: list[dict[str, Any]]) -> None:
    with (directory / "control.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in news_events)


def test_a_standing_follows_the_events(tmp_path: Path) -> None:
    tell(tmp_path, STORY)
    live = Live(tmp_path)
    shot = live.poll()
    assert shot.elastic_status == ElasticStatus(3, 2, 8, Counter(joined=3, lost=1), "1 of at least 2 workers are there")
    waits = "waits: 1 of at least 2 workers are there"
    assert describe(shot, 4).plain == f"4 workers running, none attached yet | {waits}"  # and what fits
    tell(tmp_path, [{"kind": "resumed", "at_s": 11.0}])
    shot = live.poll()
    assert (
        shot.elastic_status is not None
        and shot.elastic_status.paused == ""
        and shot.elastic_status.workers["joined"] == 3
    )
    shown = describe(LiveSnapshot(2, "bmuf()", {0: 4}, elastic_status=ElasticStatus(1, 1)), 2).plain
    assert " | 1 worker | generation 1 | joined 0 | lost 0 | " in shown
    assert Live(tmp_path / "nowhere").poll().elastic_status is None


def test_workers_that_wait_to_be_needed_are_counted(tmp_path: Path) -> None:
    story = [
        {"kind": "began", "at_s": 0.0, "most": 64},
        {"kind": "generation", "at_s": 1.0, "number": 1, "members": [[one, "a", "", 1] for one in range(8)]},
        {"kind": "held", "at_s": 1.0, "workers": 56, "wanted": 8},
    ]
    tell(tmp_path, story)
    live = Live(tmp_path)
    shot = live.poll()
    assert shot.elastic_status is not None
    assert shot.elastic_status.text.startswith("8 of 64 workers train; 56 wait until they are worth it | generation 1")
    grown = {"wanted": 16, "before": 8, "reason": "8 workers were worth 5.5"}
    tell(tmp_path, [{"kind": "grown", "at_s": 2.0, **grown}, {"kind": "held", "at_s": 2.0, "workers": 0, "wanted": 16}])
    shot = live.poll()
    assert shot.elastic_status is not None and shot.elastic_status.text.startswith("8 of at most 64 workers")
    said = "16 workers are to train instead of 8: 8 workers were worth 5.5"
    assert [item.text for item in live.notices.newest(5)][-1] == said == of_control("grown", grown, shot.elastic_status)
    only = ElasticStatus(1, 1, held=1)
    after = ElasticStatus(1, 1, held=1)
    after.add(ControlEvent(0.0, "began", {"most": 64}))  # a launcher that starts again tells of those who wait then
    assert after.held == 0
    assert only.text.startswith("1 of 2 workers trains; 1 waits until it is worth it")


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (STORY[1], "worker 0 on a has joined"),
        (STORY[5], "worker 1 on a was lost: its connection closed"),
        (STORY[6], "generation 3: 2 workers (0, 2): worker 1 was lost"),
        (STORY[7], "worker 2 is called to exchange 10"),
        (STORY[8], "the run waits: 1 of at least 2 workers are there"),
        ({"kind": "left", "worker": 0, "host": "a"}, "worker 0 on a has finished"),
        ({"kind": "ended", "reason": "the run waited"}, "the run was given up: the run waited"),
        ({"kind": "refused", "peer": "x:1", "why": "no room"}, "refused x:1: no room"),
        ({"kind": "process ended", "place": 1, "code": 3}, "the process at place 1 ended: exit code 3"),
        (
            {
                "kind": "stuck",
                "exchange": 4,
                "waited_s": 9.5,
                "workers": [{"worker": 1, "doing": "reads"}, {"worker": 2}],
            },
            "exchange 4 waits for 9.5 s: worker 1: reads; worker 2: silent",
        ),
    ],
)
def test_events_in_words(event: dict[str, Any], says: str) -> None:
    facts = {name: value for name, value in event.items() if name not in ("kind", "at_s")}
    assert event_text(event["kind"], facts) == says


def test_a_run_that_never_had_enough_workers_says_so(tmp_path: Path) -> None:
    """Its workers' logs are empty, since they attach when the first generation begins."""
    waited: list[dict[str, Any]] = [
        {"kind": "began", "at_s": 1.0, "fewest": 3, "most": 4, "control": "a:1", "again": False},
        {"kind": "paused", "at_s": 1.1, "reason": "0 of at least 3 workers are there"},
        {"kind": "program", "at_s": 5.0, "rule": "bmuf(period=4)", "numbers": 9},
        {"kind": "joined", "at_s": 5.0, "worker": 0, "host": "a"},
        {"kind": "joined", "at_s": 5.5, "worker": 1, "host": "a"},
    ]
    tell(tmp_path, waited)
    for rank in (0, 1):
        (tmp_path / f"rank-{rank:03}.jsonl").touch()
    at_work = warnings(read_run(tmp_path), at_work=True)
    assert at_work[0].startswith("The run has not begun to train: 2 of at least 3 workers are there; start more")
    tell(tmp_path, [{"kind": "lost", "at_s": at_s, "worker": int(at_s - 60), "why": "it"} for at_s in (60.0, 61.0)])
    run = read_run(tmp_path)
    assert (run.rule, run.wall_s) == ("bmuf(period=4)", 61.0)
    assert (
        "The run never trained: it waited 61 s for at least 3 workers, and at most 2 were there at once; start more "
        "workers, or give --elastic a smaller minimum than 3."
    ) in warnings(run)
    members = [[0, "a", "10.0.0.1", 1]]
    tell(tmp_path, [{"kind": "generation", "at_s": 62.0, "number": 1, "members": members, "exchange": 0}])
    assert not any("never trained" in text for text in warnings(read_run(tmp_path)))
