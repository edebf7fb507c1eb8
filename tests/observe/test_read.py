# SPDX-License-Identifier: Apache-2.0
"""The reader: what it adds up, what it forgives, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.observe import LogError, read_run, read_runs
from paceline_plugins.report.totals import Delays, data_wait_sentence, shares, summarize, too_few_blocks, warnings

from .conftest import pushing, waiting

Write = Callable[..., Path]


def test_totals_are_those_that_were_written(write_run: Write) -> None:
    run = read_run(write_run(size=4))
    assert (run.size, run.rule, run.transport, run.parameters) == (4, "bmuf(period=4)", "gloo", 250)
    assert run.hosts == ["host-0", "host-1"]
    numbers = summarize(run)
    assert numbers.minibatches == 4 * 160
    assert numbers.samples == 4 * 160 * 32
    assert numbers.blocks == 40
    assert numbers.bytes_per_worker == 40_000
    assert numbers.wall_s == 40.5
    assert numbers.minibatches_per_s == pytest.approx(640 / 40.5)
    assert numbers.shares.compute == pytest.approx(0.8)
    assert numbers.shares.wait == pytest.approx(0.15)
    assert numbers.shares.exchange == pytest.approx(0.05)
    assert warnings(run) == []


def test_the_last_value_is_the_mean_over_the_workers_last_twentieth(write_run: Write) -> None:
    run = read_run(write_run(size=2))
    finals = [[v.value for v in w.values if v.name == "loss"][-2:] for w in run.workers]
    assert len({value for pair in finals for value in pair}) == 4
    assert run.last("loss") == pytest.approx(sum(map(sum, finals)) / 4)
    validations = [[v.value for v in w.values if v.name == "validation loss"] for w in run.workers]
    assert run.last("validation loss") == validations[0][-1]
    assert run.last("no such value") is None


def test_unknown_kinds_and_fields_are_passed_over(write_run: Write) -> None:
    directory = write_run()
    log = directory / "rank-000.jsonl"
    others = (
        '{"kind": "from the future", "at_s": 1, "news": []}',
        '{"kind": "within", "at_s": 1, "text": "within 1 %: period 4 -> 8 is kept"}',
        '{"kind": "left_out", "at_s": 1, "rank_left_out": 1, "finite": true, "judged": true}',
    )
    log.write_text("\n".join([*others, log.read_text()]))
    assert summarize(read_run(directory)).minibatches == 320


def test_a_cut_off_last_line_is_counted_and_skipped(write_run: Write) -> None:
    directory = write_run()
    log = directory / "rank-001.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    run = read_run(directory)
    assert run.workers[1].truncated == 1
    assert run.workers[1].closed is None
    text = "\n".join(warnings(run))
    assert "log of worker 1 ends in the middle" in text
    assert "Worker 1 never closed" in text


def test_broken_lines_in_the_middle_are_told_with_their_numbers(write_run: Write) -> None:
    directory = write_run(size=2)
    log = directory / "rank-001.jsonl"
    rows = log.read_text().splitlines()
    rows[2] = '{"kind": "value", "at_s"'
    rows[4:4] = ["17", '{"kind": "value", "at_s": 1}', '{"kind": "x", "at_s": []}', "\0\0\0", "not JSON"]
    log.write_text("\n".join(rows) + "\n")
    run = read_run(directory)
    assert summarize(run).minibatches == 320
    assert warnings(run)[0].startswith("5 line(s) in the log of worker 1 are no events")
    assert "(rank-001.jsonl, line 3, 5, 6, ...)" in warnings(run)[0]


@pytest.mark.parametrize("text", ["17\n", "a file of something else\nand more\n", '{"kind": "x", "at_s": []}\n'])
def test_a_file_without_any_event_is_refused(write_run: Write, text: str) -> None:
    directory = write_run(size=1)
    (directory / "rank-000.jsonl").write_text(text)
    with pytest.raises(LogError, match=r"rank-000\.jsonl: none of its \d lines is an event"):
        read_run(directory)


def test_a_line_without_end_takes_no_memory(write_run: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.observe.reports.read.LONGEST_LINE", 1000)
    directory = write_run(size=1)
    with (directory / "rank-000.jsonl").open("a") as log:
        log.write("x" * 10_000 + '\n{"kind": "save", "at_s": 1.0}\n')
    worker = read_run(directory).workers[0]
    assert (worker.saves, worker.damaged_lines) == (1, 1)


def test_missing_workers_are_named(write_run: Write) -> None:
    directory = write_run(size=4)
    (directory / "rank-002.jsonl").unlink()
    run = read_run(directory)
    assert run.size == 4
    assert run.missing == [2]
    assert "No log of worker 2" in warnings(run)[0]


def test_errors_and_left_out_contributions_become_warnings(write_run: Write) -> None:
    def spoil(rank: int, events: list[dict[str, object]]) -> list[dict[str, object]]:
        hit = next(e for e in events if e.get("block") == 7)
        hit["left_out"] = [1]
        if rank == 1:
            events.append({"kind": "error", "at_s": 41.0, "rank": 1, "message": "disk is full"})
        return events

    run = read_run(write_run(size=2, change=spoil))
    assert summarize(run).left_out == 1  # both workers' logs tell of the same one
    assert warnings(run) == [
        "Worker 1 failed: disk is full. Correct the cause and run again; what the workers printed is in run/output.",
        "Worker 1's contribution was rejected in 1 of 40 exchanges (NaN or infinite): "
        "once in a while this is harmless.",
    ]


def test_delays_of_pushes_are_counted_over_all_workers(write_run: Write) -> None:
    run = read_run(write_run(size=4, rule="asgd()", change=pushing))
    blocks = {0: 40, 1: 40, 2: 18, 3: 40}
    wanted = {0: 4 * 40, 1: 3 * 40, 2: 40 + 3 * 18, 3: 3 * 40, 4: 18, 6: 40}
    assert run.delays == wanted
    assert run.workers[2].delays == {2: 54, 4: 18}
    numbers = summarize(run)
    pushes = 4 * sum(blocks.values())
    total = sum(delay * count for delay, count in wanted.items())
    assert numbers.delays == Delays(pushes, pytest.approx(total / pushes), 6)
    assert numbers.refused == 2


def test_the_lost_and_their_heirs_are_told_once(write_run: Write) -> None:
    run = read_run(write_run(size=4, rule="asgd()", change=pushing))
    assert summarize(run).lost == {2: [3]}
    assert [line.at_s for line in run.lost] == [18.5]  # of three that noticed, the first
    assert warnings(run) == [
        "Worker 2 was lost after 18.5 s: its connection was reset. "
        "Worker 3 took over its shards, from version 812 (replica). What worker 2 printed is in run/output.",
        "Rejected because not finite: 2 push(es) of worker 1; lower its rate.",
    ]


def test_each_attach_is_a_run_of_its_own(write_run: Write) -> None:
    directory = write_run(size=2, rule="sync()")
    write_run(size=1, number=2)
    first, second = read_runs(directory)
    assert (first.label, first.size, first.rule) == ("run (1)", 2, "sync()")
    assert (second.label, second.size, second.rule) == ("run (2)", 1, "bmuf(period=4)")
    assert read_run(directory).number == 2


def test_directories_without_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="does not exist"):
        read_runs(tmp_path / "nowhere")
    with pytest.raises(LogError, match="no worker's log"):
        read_runs(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PacelineError, match="is a file"):
        read_runs(tmp_path / "file")


# -- data -------------------------------------------------------------------------------------------------------------
def test_the_wait_for_data_is_a_part_of_the_time(write_run: Write) -> None:
    run = read_run(write_run(size=4, change=waiting))
    part = summarize(run).shares
    assert part.data == pytest.approx((3 * 0.2 + 0.3) / 4)
    assert part.compute == pytest.approx(0.8 - part.data)
    assert part.compute + part.data + part.wait + part.exchange == pytest.approx(1)
    assert shares([run.workers[1]]).data == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ((0.031, 0.031), ""),
        ((0.0, 0.04), ""),
        ((0.2, 0.2), "Workers waited 20.0 % of the time for data: give a loader of files more processes (num_workers)"),
        ((0.0, 0.06), "Workers waited 3.0 % of the time for data (worker 1: 6.0 %): give a loader "),
    ],
)
def test_a_sentence_says_how_long_workers_waited(write_run: Write, parts: tuple[float, float], sentence: str) -> None:
    def wait(rank: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["kind"] == "exchange":
                event["data_s"], event["compute_s"] = parts[rank], 0.8 - parts[rank]
        return events

    run = read_run(write_run(change=wait))
    assert data_wait_sentence(run).startswith(sentence)
    assert warnings(run) == list(filter(None, [data_wait_sentence(run)])) and bool(warnings(run)) == bool(sentence)


def test_data_in_memory_gets_no_advice(write_run: Write) -> None:
    def quick(rank: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [one | {"compute_s": 0.05, "data_s": 0.018} if one["kind"] == "exchange" else one for one in events]

    run = read_run(write_run(change=quick))
    assert shares(run.workers).data > 0.05 and data_wait_sentence(run) == ""


def test_virtual_workers_get_no_advice_on_data_and_one_worker_is_no_slower_than_one(write_run: Write) -> None:
    def virtual(rank: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in waiting(rank, events):
            if event["kind"] == "attach":
                event["transport"] = "virtual"
        return events

    run = read_run(write_run(size=2, change=virtual))
    assert shares(run.workers).data > 0.1
    assert "num_workers" not in data_wait_sentence(run)
    assert not any("num_workers" in text for text in warnings(run))
    alone = read_run(write_run(size=1, number=2))
    assert 0 < shares(alone.workers).compute < 1
    assert not any("one worker alone" in text for text in warnings(alone))


def test_too_few_blocks_are_reported_with_what_to_do(write_run: Write) -> None:
    run = read_run(write_run(size=32))
    assert too_few_blocks(run) == (
        "40 blocks in all: too few for 32 workers, which need some 46. For so little data take 29 workers, or period=3."
    )
    assert too_few_blocks(run) in warnings(run)
    for few in ({"size": 16}, {"size": 32, "rule": "asgd()", "change": pushing}):  # enough; pushes
        assert too_few_blocks(read_run(write_run(number=2, **few))) == ""
