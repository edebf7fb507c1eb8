# SPDX-License-Identifier: Apache-2.0
"""Lengths, means and schedules under zero lines: what each is of, and what is said where it is of something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_plugins.zero.refusals import Refusal
from tests.doors.zero.worlds import passes, run_program, samples
from tests.tables import each_value_fast, rest_is_full

TRAINING = """
loader = DataLoader(Numbers(48), batch_size=2, shuffle=True)
{before}
for epoch in range(2):
    seen.append([])
    for k, x in loader:
        train(k, x)
        {step}
    {behind}
"""


def said(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rule: str = "averaging",
    **parts: str,
) -> str:
    """What is said on stderr of a training of 24 batches on four workers."""
    source = TRAINING.format(**{"before": "pass", "step": "pass", "behind": "pass", **parts})
    found = run_program(folder, monkeypatch, source, 4, rule)
    for epoch in range(2):
        assert sorted(k for one in passes(found) for k in samples(one[epoch])) == list(range(48))
    return " ".join(capsys.readouterr().err.split())


def test_a_mean_over_the_length_of_all_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(tmp_path, monkeypatch, capsys, behind="mean = 1.0 / len(loader.dataset)")
    assert text.count("asks how many training samples there are (48)") == 1 and "trains on 1/4 of them" in text
    assert "asks how many" not in said(tmp_path, monkeypatch, capsys, behind="mean = 1.0 / len(loader)")


@pytest.mark.parametrize(
    "before", ["n = len(loader.dataset) // 2", "n = len(loader.sampler)", "n = len(loader.batch_sampler)"]
)
def test_a_length_of_all_data_that_was_asked_for_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: str
) -> None:
    text = said(tmp_path, monkeypatch, capsys, before=before)
    what = "batches there are (24)" if "batch" in before else "samples there are (48)"
    assert text.count(f"asks how many training {what}") == 1 and "train.py:33 asks" in text


# -- the number of batches ------------------------------------------------------------------------

SAMPLERS = """
class Lists(torch.utils.data.Sampler):
    "Batches of these sizes, in random order."
    def __init__(self, sizes):
        self.sizes = sizes
    def __len__(self):
        return len(self.sizes)
    def __iter__(self):
        parts = torch.arange(sum(self.sizes)).split(self.sizes)
        return iter([parts[k].tolist() for k in torch.randperm(len(parts))])

class Own(RandomSampler):
    "A sampler of the program's."

class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __iter__(self):
        return ((k, torch.tensor([k / self.n, 1.0])) for k in range(self.n))

class Loader(DataLoader):
    def __len__(self):
        return super().__len__()
"""
USES = """
loader = {loader}
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=3 * len(loader))
rows = []
for epoch in range(3):
    seen.append([])
    told, last, pending = len(loader), 0, 0
    for i, (k, x) in enumerate(loader):
        seen[-1].append(k.tolist())
        model(x).square().mean().backward()
        pending += 1
        if i % 3 == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            pending = 0
        last += i + 1 == len(loader)
        schedule.step()
    rows.append((told, len(seen[-1]), len(loader), last, pending))
"""
LENGTHS = {
    "batches of one": ("DataLoader(Numbers(40), batch_size=1, shuffle=True)", 3, [14, 13, 13]),
    "own sampler": ("DataLoader(Numbers(13), batch_size=1, sampler=Own(range(13)))", 4, [4, 3, 3, 3]),
    "a rest": ("DataLoader(Numbers(31), batch_size=2, shuffle=True)", 4, [4] * 4),
    "two rounds cut anew": ("DataLoader(Numbers(20), batch_size=4)", 4, [2] * 4),
    "drop_last": ("DataLoader(Numbers(35), batch_size=4, shuffle=True, drop_last=True)", 3, [2] * 3),
    "batch sampler": ("DataLoader(Numbers(24), batch_sampler=Lists([5, 1, 7, 2, 6, 1, 1, 1]))", 3, [3] * 3),
    "lists of one": ("DataLoader(Numbers(14), batch_sampler=Lists([1] * 14))", 3, [5, 5, 4]),
    "stream of ones": ("DataLoader(Stream(14), batch_size=1)", 3, [5, 4, 5]),
    "stream": ("DataLoader(Stream(14), batch_size=4)", 3, [2, 2, 1]),
    "stream, drop_last": ("DataLoader(Stream(14), batch_size=4, drop_last=True)", 3, [1] * 3),
    "a class of its own": ("Loader(Numbers(40), batch_size=1, shuffle=True)", 3, [14, 13, 13]),
}


BLOCKS = ["averaging(period=2)", "bmuf(period=3)", "diloco"]
EVEN = [kind for kind, (_, _, batches) in LENGTHS.items() if len(set(batches)) == 1]


@pytest.mark.parametrize(
    ("kind", "rule"), [*each_value_fast(list(LENGTHS), BLOCKS), *rest_is_full([(kind, "sync") for kind in EVEN], 2)]
)
def test_the_last_batch_is_known_by_the_length_on_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rule: str
) -> None:
    """`i + 1 == len(loader)` is so once a pass; no accumulated gradients are left; a schedule comes to its end."""
    loader, workers, batches = LENGTHS[kind]
    for rank, one in enumerate(
        run_program(tmp_path, monkeypatch, SAMPLERS + USES.format(loader=loader), workers, rule)
    ):
        assert one["rows"] == [(batches[rank], batches[rank], batches[rank], 1, 0)] * 3
        assert one["schedule"].last_epoch in (3 * batches[rank], 3 * max(batches))


def test_under_an_asynchronous_rule_a_length_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(tmp_path, monkeypatch, capsys, "asgd", before="count = len(loader)")
    assert text.count("train.py:33 asked for the length of the loader of") == 1 and "under asgd a fast worker" in text
    assert "a fast worker" not in said(tmp_path, monkeypatch, capsys, "asgd")
    assert "a fast worker" not in said(tmp_path, monkeypatch, capsys, before="count = len(loader)")


def test_a_length_is_that_of_the_last_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training data are evaluated on, in training mode; means are made after each pass."""
    source = """
    loader, rows = DataLoader(Numbers(24), batch_size=2, shuffle=True), []
    for epoch in range(2):
        seen.append([])
        for k, x in loader:
            train(k, x)
        rows.append(len(loader))
        seen.append([])
        with torch.no_grad():
            for k, x in loader:
                look(k, x)
        rows.append(len(loader))
    """
    for one in run_program(tmp_path, monkeypatch, source):
        assert one["rows"] == [6, 12] * 2
    capsys.readouterr()
    run_program(tmp_path, monkeypatch, source.replace("len(loader)", "0"))
    assert "asked for the length" not in capsys.readouterr().err
    run_program(tmp_path, monkeypatch, source.replace("len(loader)", "0").replace("rows.append(0)", "len(loader)", 1))
    assert "train.py:37 asked for the length" in capsys.readouterr().err


SCHEDULES = {
    "OneCycleLR": "torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, epochs=2, steps_per_epoch=48 // 2)",
    "CosineAnnealingLR": "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=48)",
    "LambdaLR": "(lambda total: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / total))(48)",
}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule_that_was_made_for_the_steps_of_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text = said(tmp_path, monkeypatch, capsys, before=f"rates = {SCHEDULES[name]}", step="rates.step()")
    assert text.count(f"{name} was made for 2 passes of 24 steps, and a pass of this worker has 6") == 1
    if name != "CosineAnnealingLR":
        return
    asked = f"shown = len(loader)\nrates = {SCHEDULES[name]}"  # for show
    text = said(tmp_path, monkeypatch, capsys, before=asked, step="rates.step()")
    assert text.count("CosineAnnealingLR was made for 48 steps, and has made 12") == 1
    fits = "rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))"
    assert "was made for" not in said(tmp_path, monkeypatch, capsys, before=fits, step="rates.step()")
    by_epoch = "rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)"
    assert "was made for" not in said(tmp_path, monkeypatch, capsys, before=by_epoch, behind="rates.step()")


def test_a_schedule_whose_total_no_one_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It falls to nothing after the steps of one worker. Others end with a worker's own steps, or never."""

    def text(fall: str) -> str:
        made = f"steps = 48\nrates = torch.optim.lr_scheduler.LambdaLR(optimizer, {fall})"
        return said(tmp_path, monkeypatch, capsys, before=made, step="rates.step()")

    cosine = "lambda k: 0.5 + 0.5 * float(torch.tensor(3.14159265 * min(k, steps) / steps).cos())"
    for fall in ("lambda k: max(0.0, 1 - k / steps)", cosine):
        assert text(fall).count("LambdaLR was made for 48 steps, and has made 12") == 1
    for fall in ("lambda k: max(0.0, 1 - k / 12)", "lambda k: 0.97 ** k", "lambda k: (k + 1) ** -0.5", "lambda k: 1"):
        assert "was made for" not in text(fall)


def test_a_rate_by_a_worker_s_own_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plateau = "rates = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)"
    told = said(tmp_path, monkeypatch, capsys, "asgd", before=plateau, step="rates.step(1.0)")
    assert told.count("ReduceLROnPlateau goes by this worker's own loss") == 1
    after = said(tmp_path, monkeypatch, capsys, "asgd", before=plateau, behind="rates.step(1.0)")
    assert "own loss" not in after


ENGINE = """
def go(step, data):
    count = len(data)
    for number, (k, x) in enumerate(data):
        if number == count:
            break
        step(k, x)
"""
ENGINES = """
from engine_of_a_library import go

loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
held_out = DataLoader(Numbers(6), batch_size=2)

def training(k, x):
    model.train()
    train(k, x)

def looking(k, x):
    model.eval()
    with torch.no_grad():
        look(k, x)

for epoch in range(3):
    seen.append([])
    go(training, loader)
    seen.append([])
    go(looking, loader)
    seen.append([])
    go(looking, held_out)
"""


def test_an_engine_that_goes_as_far_as_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine_of_a_library.py").write_text(ENGINE)
    found = run_program(tmp_path, monkeypatch, ENGINES)
    for epoch in range(3):
        assert sorted(k for one in passes(found) for k in samples(one[3 * epoch])) == list(range(24))
        assert all(sorted(samples(one[3 * epoch + 1])) == list(range(24)) for one in passes(found))
        assert all(samples(one[3 * epoch + 2]) == list(range(6)) for one in passes(found))


# -- evaluations that stop early ------------------------------------------------------------------

LIMITED = """
import itertools
loader, held_out = DataLoader(Numbers(24), batch_size=2, shuffle=True), DataLoader(Numbers(40), batch_size=2)
limit = {limit}
for epoch in range(2):
    seen.append([])
    model.train()
    for k, x in loader:
        train(k, x)
    seen.append([])
    model.eval()
    with torch.no_grad():
        {evaluation}
"""
EVALUATIONS = {
    "break before": "for i, (k, x) in enumerate({data}):\n            if i >= limit: break\n            look(k, x)",
    "break after": "for i, (k, x) in enumerate({data}):\n            look(k, x)\n            if i + 1 == limit: break",
    "islice": "for k, x in itertools.islice({data}, limit): look(k, x)",
    "zip": "for i, (k, x) in zip(range(limit), {data}): look(k, x)",
    "next": "source = iter({data})\n        for i in range(limit): look(*next(source))",
}


LIMITS = ["len(loader)", "len(loader) // 2", "3", "torch.no_grad()(lambda: len(loader) // 2)()"]


@pytest.mark.parametrize(("evaluation", "limit"), each_value_fast(list(EVALUATIONS), LIMITS))
def test_an_evaluation_that_goes_by_the_length_of_the_training_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], evaluation: str, limit: str
) -> None:
    source = LIMITED.format(limit=limit, evaluation=EVALUATIONS[evaluation].format(data="held_out"))
    rows = passes(run_program(tmp_path, monkeypatch, source))
    text = " ".join(capsys.readouterr().err.split())
    batches = len(rows[0][1]) + (evaluation == "break before")
    named = f"evaluates {batches} of 20 batches and stops. train.py:34 got a length of 6"
    assert text.count(named) == text.count("and stops") == int(limit.startswith("len"))


@pytest.mark.parametrize("evaluation", list(EVALUATIONS))
def test_an_evaluation_that_ends_where_a_part_of_its_own_loader_would_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: str
) -> None:
    source = LIMITED.format(limit="len(loader)", evaluation=EVALUATIONS[evaluation].format(data="loader"))
    with pytest.raises(Refusal, match=r"24 samples without a step, and left them after [67] batches"):
        run_program(tmp_path, monkeypatch, source)


def test_without_gradients_a_length_is_that_of_all_also_within_a_training_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
    loader, told = DataLoader(Numbers(24), batch_size=2, shuffle=True), []
    seen.append([])
    for k, x in loader:
        train(k, x)
        with torch.no_grad():
            told.append((len(loader), "without"))
        told.append((len(loader), "with"))
    """
    for one in run_program(tmp_path, monkeypatch, source):
        assert set(one["told"]) == {(12, "without"), (6, "with")}
