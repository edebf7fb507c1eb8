# SPDX-License-Identifier: Apache-2.0
"""What workers write into their receipts: every sample once under every rule, also after a resume."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import paceline
from paceline.errors import UnsupportedError
from paceline_plugins.receipts.audit import Findings, audit, find
from tests.helpers import attached, follow
from tests.observe.receipts.written import BATCH, EXACT, SAMPLES, WORKERS, Net, data, forge, lines_of, train

RULES = [
    "sync()",
    "power()",
    "averaging(period=3)",
    EXACT,
    "bmuf(period=2, warmup=4)",
    "diloco(period=2, ema=0.5)",
    "bmuf_adam(period=3)",
    "streaming_diloco(period=4, fragments=2, overlap=1)",
    "averaging(period=2, codec='int8')",
    "auto()",
]


def findings(folder: Path) -> Findings:
    """Without what is said of the missing seal."""
    found = audit(folder, find(folder))
    found.open = [one for one in found.open if not one.startswith("no seal")]
    return found


@pytest.mark.parametrize("rule", RULES)
def test_each_sample_is_in_one_receipt_and_the_run_is_as_without_them(tmp_path: Path, rule: str) -> None:
    settings: dict[str, Any] = {}
    bare = paceline.simulate(functools.partial(train, None, rule, **settings), WORKERS)
    kept = paceline.simulate(functools.partial(train, tmp_path, rule, **settings), WORKERS)
    assert all(map(torch.equal, bare[0] or [], kept[0] or []))
    found = findings(tmp_path)
    assert found.code == 0, found
    assert found.shown[-2:] == [f"pass {k}: 40 places of 40 places, each exactly once" for k in (0, 1)]


def batches_of_sampler() -> DataLoader[Any]:
    return DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(data()), BATCH, drop_last=False))


def a_list() -> list[Any]:
    return list(DataLoader(data(), BATCH))


class Plain:
    """An iterable of batches, and no more."""

    def __iter__(self) -> Any:
        return iter(a_list())


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (batches_of_sampler, "20 places of 20 places, each exactly once"),
        (a_list, "20 places of 20 places, each exactly once"),
        (Plain, "20 places of a pass whose length is not known, each exactly once"),
        (functools.partial(DataLoader, data(), BATCH, drop_last=True), "36 places of 36 places, each exactly once"),
    ],
)
def test_each_kind_of_loader_names_its_places(tmp_path: Path, loader: Any, says: str) -> None:
    paceline.simulate(functools.partial(train, tmp_path, loader=loader), WORKERS)
    found = findings(tmp_path)
    assert found.code == 0 and found.shown[-1] == f"pass 1: {says}", found


def test_a_validation_over_shared_data_is_not_training(tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader, other = DataLoader(data(), BATCH), DataLoader(data(), BATCH)
        with paceline.attach(model, optimizer, EXACT, receipts=tmp_path) as run:
            for _ in range(2):
                for x, y in run.share(loader):
                    follow(optimizer, (model(x) - y).square().mean())
                with torch.no_grad():
                    for x, _ in run.share(other):
                        model(x)

    paceline.simulate(program, WORKERS)
    found = findings(tmp_path)
    assert found.code == 0 and "pass 1 of loader 0: 40 places of 40 places, each exactly once" in found.shown, found


def stop_after(steps: int, folder: Path, checkpoint: Path, rule: str) -> None:
    """The same program, which its machine stops."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = paceline.attach(model, optimizer, rule, receipts=folder, checkpoint=checkpoint, every_blocks=1)
    run.resume()
    for x, y in run.share(DataLoader(data(), BATCH, shuffle=True)):
        follow(optimizer, torch.nn.functional.mse_loss(model(x), y))
        if run.minibatches == steps:
            run.abandon()
            return


def interrupted(tmp_path: Path, rule: str = "averaging(period=2)") -> Path:
    folder, checkpoint = tmp_path / "receipts", tmp_path / "steps"
    paceline.simulate(functools.partial(stop_after, 5, folder, checkpoint, rule), WORKERS)
    assert len(lines_of(folder, 0)) == 3  # two merges
    again = functools.partial(train, folder, rule, checkpoint=checkpoint, every_blocks=1)
    paceline.simulate(again, WORKERS)
    return folder


def test_a_chain_goes_on_after_a_resume_and_still_counts_each_sample_once(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    kinds = [line["kind"] for line in lines_of(folder, 1)]
    assert kinds[:3] == ["start", "merge", "merge"] and kinds[3:5] == ["start", "resume"]
    found = findings(folder)
    assert found.code == 0 and len([one for one in found.shown if "40 places of 40 places" in one]) == 2, found


def test_a_half_line_of_a_killed_worker_is_cut(tmp_path: Path) -> None:
    folder, checkpoint, rule = tmp_path / "receipts", tmp_path / "steps", "averaging(period=2)"
    paceline.simulate(functools.partial(stop_after, 5, folder, checkpoint, rule), WORKERS)
    with (folder / "rank-001.jsonl").open("a") as file:
        file.write('{"fragment":0,"giv')
    paceline.simulate(functools.partial(train, folder, rule, checkpoint=checkpoint, every_blocks=1), WORKERS)
    assert findings(folder).code == 0


def test_a_run_that_goes_on_from_another_state_is_found(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    for rank in range(WORKERS):  # as if the checkpoint had been altered
        forge(folder, rank, lambda lines: lines[4]["models"].update({"0": "0" * 64}))
    found = findings(folder)
    assert found.code == 1 and "went on after exchange 2 from another model than it had there" in found.problems[0]


def test_receipts_that_begin_in_the_middle_say_what_they_cover(tmp_path: Path) -> None:
    folder, checkpoint, rule = tmp_path / "receipts", tmp_path / "steps", "averaging(period=2)"
    paceline.simulate(functools.partial(stop_after, 5, folder, checkpoint, rule), WORKERS)
    later = tmp_path / "later"
    paceline.simulate(functools.partial(train, later, rule, checkpoint=checkpoint, every_blocks=1), WORKERS)
    found = findings(later)
    assert found.code == 0, found
    before = 2 * 2 * WORKERS * BATCH  # two blocks of two batches
    assert found.shown[-2] == f"pass 0: {SAMPLES - before} places of 40 places, each exactly once"


def test_a_contribution_that_was_left_out_is_said(tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        with attached(model, "averaging(period=2)", lr=0.01, receipts=tmp_path) as (run, _, optimizer):
            for x, y in run.share(DataLoader(data(), BATCH)):
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                if run.world.rank == 1 and run.minibatches == 1:
                    model.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
                optimizer.step()

    paceline.simulate(program, WORKERS)
    found = findings(tmp_path)
    assert found.code == 0 and found.shown[-1].endswith("4 places of them in contributions that were left out"), found


@pytest.mark.parametrize(
    ("workers", "rule", "says"),
    [
        (1, EXACT, "one worker merges nothing; start more, or leave receipts out"),
        (2, "asgd()", "each worker exchanges by itself, and there is no common merge"),
        (2, "bmuf(period=2, within='host')", "the processes of a host are one worker; leave within out"),
    ],
)
def test_runs_without_books_are_refused_before_they_train(tmp_path: Path, workers: int, rule: str, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        paceline.simulate(functools.partial(train, tmp_path / "receipts", rule), workers)
    assert not (tmp_path / "receipts").exists()


def test_sums_that_follow_the_route_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paceline.simulate(functools.partial(train, tmp_path / "a", "averaging(period=4)"), WORKERS)
    assert "a block of this run that is made again may have other bits" in caplog.text
    assert "add reproducible=True" in caplog.text
    caplog.clear()
    paceline.simulate(functools.partial(train, tmp_path / "b", EXACT), WORKERS)
    paceline.simulate(functools.partial(train, tmp_path / "c", "averaging(period=4)"), 2)  # a + b is b + a
    assert not caplog.text
