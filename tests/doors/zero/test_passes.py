# SPDX-License-Identifier: Apache-2.0
"""What a pass is for: every sample of a training once, all of an evaluation on every worker, or a refusal."""

from __future__ import annotations

import builtins
import re
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from paceline.errors import UnsupportedError
from paceline.run import hooks
from paceline_plugins.zero.refusals import Refusal
from tests.doors.zero.worlds import EVALUATION, passes, run_program, samples

Found = list[dict[str, Any]]
Start = Callable[..., Found]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs a program on virtual workers."""

    def start(source: str, workers: int = 2, rule: str = "averaging(period=2)") -> Found:
        return run_program(tmp_path, monkeypatch, source, workers, rule)

    return start


def trained(found: Found, number: int, n: int) -> None:
    """In pass `number` each of n samples was on one worker."""
    parts = [samples(one[number]) for one in passes(found)]
    assert sorted(k for part in parts for k in part) == list(range(n))
    assert all(len(part) < n for part in parts)


def evaluated(found: Found, number: int, n: int) -> None:
    """In pass `number` each worker saw all of n samples."""
    for one in passes(found):
        assert sorted(samples(one[number])) == list(range(n))


LOADERS = {
    "shuffled": "DataLoader(Numbers(24), batch_size=2, shuffle=True)",
    "in turn": "DataLoader(Numbers(24), batch_size=2)",
    "processes": "DataLoader(Numbers(24), batch_size=2, shuffle=True, num_workers=1)",
    "batches": "DataLoader(Numbers(24), batch_sampler=torch.utils.data.BatchSampler(range(24), 2, False))",
}
NO_TRAIN = """
loader = {loader}
held_out = DataLoader(Numbers(6), batch_size=4)
for epoch in range(3):
    {again}
    seen.append([])
    for k, x in loader:
        train(k, x)
"""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.processes] if kind == "processes" else []) for kind in LOADERS]
)
@pytest.mark.parametrize("again", [False, True])
def test_a_loop_without_train_is_split_in_every_epoch(start: Start, kind: str, again: bool) -> None:
    """The model stays in evaluation mode from the first epoch on; loaders may be made anew for each."""
    if kind == "processes" and again:
        pytest.skip("the same with processes")
    source = (NO_TRAIN + EVALUATION).format(
        loader=LOADERS[kind], again="loader = " + LOADERS[kind] if again else "pass"
    )
    found = start(source)
    for epoch in range(3):
        trained(found, 2 * epoch, 24)
        evaluated(found, 2 * epoch + 1, 6)


def test_a_model_that_is_in_evaluation_before_its_first_pass_is_split_too(start: Start) -> None:
    """A check of the held-out data before training, and `model.train()` inside the loop; or never."""
    source = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    held_out = DataLoader(Numbers(6), batch_size=4)
    for epoch in range(2):
        model.eval()
        seen.append([])
        with torch.no_grad():
            for k, x in held_out:
                look(k, x)
        seen.append([])
        for k, x in loader:
            {train}
            train(k, x)
    """
    for line in ("model.train()", "pass"):
        found = start(source.format(train=line))
        for epoch in range(2):
            evaluated(found, 2 * epoch, 6)
            trained(found, 2 * epoch + 1, 24)


def test_a_first_pass_in_evaluation_mode_in_an_order_that_matters_is_refused_at_its_first_step(start: Start) -> None:
    source = """
    loader = DataLoader(Numbers(24), batch_size=2)
    model.eval()
    seen.append([])
    for k, x in loader:
        train(k, x)
    """
    with pytest.raises(Refusal, match=r"(?s)SGD steps in the pass of train.py:.* 24 samples.*call model.train\(\)"):
        start(source)


def test_modes_that_are_set_inside_of_the_loop(start: Start) -> None:
    """As engines of other libraries do: each step of a pass says by itself whether it trains."""
    source = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    held_out = {held_out}
    def go(data, training):
        seen.append([])
        for k, x in data:
            model.train(training)
            if training:
                train(k, x)
            else:
                with torch.no_grad():
                    look(k, x)
    {before}
    for epoch in range(3):
        go(loader, True)
        go(held_out, False)
        go(loader, False)
    """
    for held_out in ("DataLoader(Numbers(7), batch_size=2)", "DataLoader(Numbers(7), batch_size=2, shuffle=True)"):
        for before in ("pass", "go(held_out, False)"):
            found = start(source.format(held_out=held_out, before=before))
            shift = int(before != "pass")
            for epoch in range(3):
                trained(found, 3 * epoch + shift, 24)
                evaluated(found, 3 * epoch + 1 + shift, 7)
                evaluated(found, 3 * epoch + 2 + shift, 24)
            if "shuffle" not in held_out:  # what is shown is what rank 0 sees
                for epoch in range(3):
                    assert passes(found)[0][3 * epoch + 1 + shift] == [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize("mode", ["model.eval()", "model.train()"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_evaluation_with_gradients_on(start: Start, mode: str, shuffle: bool) -> None:
    """Neither `no_grad` nor, in training mode, `eval`."""
    source = f"""
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    held_out = DataLoader(Numbers(10), batch_size=2, shuffle={shuffle})
    for epoch in range(2):
        model.train()
        seen.append([])
        for k, x in loader:
            train(k, x)
        {mode}
        seen.append([])
        for k, x in held_out:
            look(k, x)
    """
    if mode == "model.train()" and not shuffle:
        with pytest.raises(Refusal, match=r"(?s)10 samples with the model in training mode and made no step"):
            start(source)
        return
    found = start(source)
    for epoch in range(2):
        trained(found, 2 * epoch, 24)
        evaluated(found, 2 * epoch + 1, 10)


def test_a_step_in_a_pass_with_gradients_off_is_refused(start: Start) -> None:
    source = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    seen.append([])
    with torch.no_grad():
        for k, x in loader:
            with torch.enable_grad():
                train(k, x)
    """
    with pytest.raises(Refusal, match="gradients were off when it began"):
        start(source)


def test_one_batch_of_all_samples_is_no_part_of_them(start: Start) -> None:
    """`next(iter(loader))` of a held-out set in one batch: whole where something else is trained from, or refused."""
    ahead = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    held_out = DataLoader(Numbers(9), batch_size=9{shuffle})
    for epoch in range(2):
        seen.append([])
        for k, x in loader:
            train(k, x)
        seen.append([])
        look(*next(iter(held_out)))
    """
    found = start(ahead.format(shuffle=""))
    for epoch in range(2):
        trained(found, 2 * epoch, 24)
        evaluated(found, 2 * epoch + 1, 9)
    with pytest.raises(Refusal, match=r"(?s)9 samples with the model in training mode .*one batch"):
        start(ahead.format(shuffle=", shuffle=True"))
    first = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    held_out = DataLoader(Numbers(9), batch_size=9)
    seen.append([])
    k, x = next(iter(held_out))
    {then}
    """
    with pytest.raises(Refusal, match=r"(?s)train.py:\d+ went through 9 samples"):
        start(first.format(then="pass"))  # at the program's end
    with pytest.raises(Refusal, match=r"(?s)train.py:\d+ went through 9 samples"):
        start(first.format(then="for k, x in loader: train(k, x)"))
    with pytest.raises(Refusal, match=r"(?s)train.py:\d+ went through 9 samples"):
        start(first.format(then="model.eval()\n    with torch.no_grad(): look(k, x)"))


def test_a_pass_that_is_left_is_judged(start: Start) -> None:
    source = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    held_out = DataLoader(Numbers(24), batch_size=2)
    for epoch in range(2):
        seen.append([])
        for number, (k, x) in enumerate(held_out):
            if number == 4:
                break
            {look}
        seen.append([])
        for k, x in loader:
            train(k, x)
    """
    with pytest.raises(Refusal, match=r"(?s)24 samples with the model in training mode .*5 batches"):
        start(source.format(look="look(k, x)"))
    found = start(source.format(look="with torch.no_grad(): look(k, x)"))
    for epoch in range(2):
        assert passes(found)[0][2 * epoch] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        trained(found, 2 * epoch + 1, 24)


def test_a_training_that_is_left_early_is_merged_before_its_model_is_looked_at(start: Start) -> None:
    source = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    for epoch in range(2):
        seen.append([])
        for number, (k, x) in enumerate(loader):
            if number == 3:
                break
            train(k, x)
        model.eval()
        with torch.no_grad():
            seen.append([[round(model(torch.ones(2)).item(), 6)]])
        model.train()
    """
    one, other = passes(start(source, rule="averaging(period=100)"))
    assert one[1] == other[1] and one[3] == other[3] and one[1] != one[3]
    for epoch in (0, 2):
        assert len(samples(one[epoch])) == 6 and not set(samples(one[epoch])) & set(samples(other[epoch]))


def test_gradients_that_are_added_up(start: Start) -> None:
    """Over some batches, over a whole pass, with and without a step behind the pass."""
    source = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    for epoch in range(2):
        seen.append([])
        for number, (k, x) in enumerate(loader):
            seen[-1].append(k.tolist())
            model(x).square().mean().backward()
            if number % {every} == {every} - 1:
                optimizer.step()
                optimizer.zero_grad()
        {after}
    """
    for every, after in ((4, "pass"), (4, "optimizer.step()"), (1000, "optimizer.step()")):
        found = start(source.format(every=every, after=after))
        for epoch in range(2):
            trained(found, epoch, 24)
    with pytest.raises(Refusal, match=r"(?s)24 samples with the model in training mode and made no step"):
        start(source.format(every=1000, after="pass"))


def test_a_loss_that_is_summed_over_a_pass_cannot_be_split(start: Start) -> None:
    source = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    loss = 0
    for k, x in loader:
        loss = loss + model(x).square().mean()
    loss.backward()
    optimizer.step()
    """
    with pytest.raises(Refusal, match=r"(?s)SGD steps in the pass of train.py"):
        start(source)


def test_several_loaders_in_one_loop(start: Start) -> None:
    source = """
    import itertools
    first = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    second = DataLoader(Numbers(12), batch_size=2, shuffle=True)
    a, b = [], []
    seen += [a, b]
    for (k, x), (j, z) in zip(first, {second}):
        a.append(k.tolist())
        b.append(j.tolist())
        optimizer.zero_grad()
        (model(x) + model(z)).square().mean().backward()
        optimizer.step()
    """
    found = start(source.format(second="second"))
    trained(found, 1, 12)
    assert not set(samples(passes(found)[0][0])) & set(samples(passes(found)[1][0]))
    found = start(source.format(second="itertools.cycle(second)"))
    trained(found, 0, 24)
    assert not set(samples(passes(found)[0][1])) & set(samples(passes(found)[1][1]))


ITERATED = """
loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
held_out = DataLoader(Numbers(6), batch_size=4)
source = iter(loader)
seen.append([])
for number in range(12):
    try:
        k, x = next(source)
    except StopIteration:
        source = iter(loader)
        seen.append([])
        k, x = next(source)
    {peek}
    train(k, x)
    if number % 4 == 3:
        model.eval()
        with torch.no_grad():
            assert sum(len(look_k) for look_k, _ in held_out) == 6
        {back}
"""


@pytest.mark.parametrize("back", ["model.train()", "pass"])
@pytest.mark.parametrize("peek", ["pass", "with torch.no_grad(): model(next(iter(held_out))[1])"])
def test_a_training_by_iterations(start: Start, back: str, peek: str) -> None:
    found = start(ITERATED.format(back=back, peek=peek))
    for epoch in range(2):
        trained(found, epoch, 24)


def test_subsets_of_one_dataset_and_one_function_for_both(start: Start) -> None:
    source = """
    data = Numbers(24)
    loader = DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(16)))
    held_out = DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(16, 24)))
    def go(loader, training):
        model.train(training)
        seen.append([])
        for k, x in loader:
            with torch.set_grad_enabled(training):
                if training:
                    train(k, x)
                else:
                    look(k, x)
    for epoch in range(2):
        go(loader, True)
        go(held_out, False)
        go(loader, False)
    """
    found = start(source)
    for epoch in range(2):
        trained(found, 3 * epoch, 16)
        evaluated(found, 3 * epoch + 2, 16)
        for one in passes(found):
            assert sorted(samples(one[3 * epoch + 1])) == list(range(16, 24))


def test_lengths_follow_what_a_loader_is_used_for(start: Start) -> None:
    source = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    held_out = DataLoader(Numbers(8), batch_size=2, shuffle=True)
    lengths = [len(loader)]
    for epoch in range(2):
        model.train()
        seen.append([])
        for k, x in loader:
            train(k, x)
            lengths.append(len(loader))
        lengths.append(len(loader))
        model.eval()
        lengths.append(len(held_out))
        with torch.no_grad():
            for k, x in held_out:
                lengths.append(len(held_out))
        lengths.append(len(held_out))
    """
    one, other = start(source)
    assert one["lengths"] == other["lengths"] == [6, *([6] * 6 + [6, 4] + [4] * 4 + [4]) * 2]
    source = """
    loader, held_out = DataLoader(Numbers(24), batch_size=2), DataLoader(Numbers(8), batch_size=2)
    lengths = [len(loader), len(held_out)]
    for k, x in loader:
        seen.append([])
        train(k, x)
    """
    assert start(source)[0]["lengths"] == [6, 4]


@pytest.mark.parametrize(("n", "batch", "workers"), [(9, 2, 3), (33, 4, 3), (50, 8, 4)])
def test_a_program_that_counts_on_its_batch_size(start: Start, n: int, batch: int, workers: int) -> None:
    """BatchNorm cannot take a batch of one sample, and a queue takes batches of one size."""
    source = f"""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Numbers({n}), batch_size={batch}, shuffle=True, drop_last=True)
    queue, place = torch.zeros({4 * batch}, 2), 0
    for epoch in range(2):
        seen.append([])
        for k, x in loader:
            queue[place : place + {batch}] = x
            place = (place + {batch}) % len(queue)
            train(k, x)
    """
    found = start(source, workers)
    for epoch in range(2):
        got = [k for one in passes(found) for k in samples(one[epoch])]
        assert len(got) == len(set(got)) == n // (batch * workers) * batch * workers


def test_a_process_in_which_nothing_was_attached_before_splits_every_pass(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What notices forgotten loaders in programs of two lines does not come between zero lines and the program."""
    before = DataLoader.__iter__
    for owner, name in (DataLoader, "__iter__"), (DataLoader, "__len__"), (LRScheduler, "step"):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as they were, afterwards
    patch = cache(hooks._patch.__wrapped__)  # not yet called
    monkeypatch.setattr(hooks, "_patch", patch)
    source = (
        "loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)\nfor epoch in range(3):\n    seen.append([])\n"
    )
    found = start(source + "    for k, x in loader:\n        train(k, x)\n")
    for number in range(3):
        trained(found, number, 24)
    assert DataLoader.__iter__ is before


SWALLOWED = {
    "a step without a loader": """
        for k in range(4):
            try:
                train(torch.tensor([k]), torch.ones(1, 2))
            except Exception as error:
                caught.append(error)
    """,
    "a pass without a step": """
        try:
            for k, x in DataLoader(Numbers(24), batch_size=4):
                look(k, x)
        except Exception as error:
            caught.append(error)
    """,
    "a model that cannot be attached": """
        model.lazy = nn.LazyLinear(1)
        optimizer.add_param_group({"params": model.lazy.parameters()})
        try:
            for k, x in DataLoader(Numbers(24), batch_size=4, shuffle=True):
                train(k, x)
        except ValueError as error:
            caught.append(error)
    """,
    "a backward pass without an optimizer": """
        del optimizer
        for k in range(12):
            try:
                model(torch.ones(1, 2)).sum().backward()
            except ValueError as error:
                caught.append(error)
    """,
    "a way out": """
        import sys
        try:
            train(torch.tensor([0]), torch.ones(1, 2))
        except Exception as error:
            caught.append(error)
        sys.exit(0)
    """,
}
"""Programs whose own `except` takes a refusal: log and go on, or log and end."""


@pytest.mark.parametrize("kind", SWALLOWED)
def test_a_refusal_that_the_program_catches_is_raised_at_its_end(
    start: Start, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "caught = []\nseen.append([])\n" + textwrap.dedent(SWALLOWED[kind])
    with pytest.raises(UnsupportedError):
        start(source)
    assert "the program caught this refusal and went on" in capsys.readouterr().err


def test_what_the_program_catches_of_its_own_is_no_refusal(start: Start) -> None:
    source = """
    loader = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    seen.append([])
    for k, x in loader:
        try:
            train(k, x)
            raise ValueError
        except ValueError:
            pass
    """
    trained(start(source), 0, 24)


def test_a_new_optimizer_that_steps_without_a_loader_is_refused_also_after_a_pass(start: Start) -> None:
    source = """
    seen.append([])
    for k, x in DataLoader(Numbers(24), batch_size=2, shuffle=True):
        train(k, x)
    late = torch.optim.SGD(model.parameters(), lr=0.01)
    for k in range(4):
        late.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        late.step()
    """
    with pytest.raises(Refusal, match="no DataLoader was gone through"):
        start(source)


@pytest.mark.parametrize("rule", ["sync", "averaging(period=2)"])
def test_data_parallel_over_one_device_is_the_module_inside(start: Start, rule: str) -> None:
    source = """
    inner, model = model, nn.DataParallel(model)
    seen.append([])
    for k, x in DataLoader(Numbers(24), batch_size=2, shuffle=True):
        train(k, x)
    model.eval()
    seen.append([])
    with torch.no_grad():
        for k, x in DataLoader(Numbers(9), batch_size=3):
            look(k, x)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    kept = {name: torch.ones_like(value) for name, value in saved.items()}
    model.load_state_dict(kept)
    with torch.no_grad():
        loaded = float(model(torch.ones(1, 2)))
    """
    found = start(source, rule=rule)
    trained(found, 0, 24)
    evaluated(found, 1, 9)
    assert all(torch.equal(found[0]["saved"][name], found[1]["saved"][name]) for name in found[0]["saved"])
    assert [one["loaded"] for one in found] == [3.0, 3.0]


@pytest.mark.parametrize("rule", ["sync", "averaging(period=2)", "bmuf(period=2)", "asgd", "easgd(period=2)"])
def test_a_critic_that_is_frozen_while_its_generator_steps(start: Start, rule: str) -> None:
    source = """
    critic, generator = model, nn.Linear(2, 2)
    g = torch.optim.SGD(generator.parameters(), lr=0.01)
    for epoch in range(2):
        seen.append([])
        for k, x in DataLoader(Numbers(24), batch_size=2, shuffle=True):
            critic.requires_grad_(True)
            train(k, x)
            critic.requires_grad_(False)
            g.zero_grad()
            critic(generator(torch.randn(2, 2))).square().mean().backward()
            g.step()
    end = [p.detach().clone() for one in (critic, generator) for p in one.parameters()]
    """
    found = start(source, rule=rule)
    for epoch in range(2):
        trained(found, epoch, 24)
    assert all(map(torch.equal, found[0]["end"], found[1]["end"]))


LIBRARY = """
import torch

def run_epoch(loader, train, step):
    for k, x in loader:
        if train:
            step(k, x)
        else:
            with torch.no_grad():
                step(k, x)

def fit(training, held_out, train, look):
    for epoch in range(2):
        run_epoch(training, True, train)
        run_epoch(held_out, False, look)
"""


def test_loops_of_a_module_are_told_apart_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One loop for training and evaluation, in a module that is not the program."""
    (tmp_path / "pl_loops.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    source = """
    import pl_loops

    def evaluate(k, x):
        model.eval()
        seen.append(k.tolist())
        model(x)
        model.train()

    def step(k, x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    held_out = DataLoader(Numbers(6), batch_size=8)
    pl_loops.fit(DataLoader(Numbers(16), batch_size=2, shuffle=True), held_out, step, evaluate)
    """
    found = run_program(tmp_path, monkeypatch, source)
    assert [one["seen"] for one in found] == [[list(range(6))] * 2] * 2
    said = capsys.readouterr().err
    assert re.search(r"train.py:\d+ \(pl_loops.py:5 from pl_loops.py:14\): 16 samples, for training", said)
    assert re.search(r"train.py:\d+ \(pl_loops.py:5 from pl_loops.py:15\): 6 samples, for evaluation", said)


@pytest.mark.parametrize("rule", ["bmuf(period=3)", "sync"])
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("keeps", ["one == 0", "one == 1", "epoch % 2 == one", "True"])
def test_passes_that_are_left_end_alike_whoever_keeps_their_iterators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: str, evaluates: bool, rule: str
) -> None:
    """A worker may hold the iterators of its passes longer than others do."""
    monkeypatch.setattr(builtins, "began", [], raising=False)  # which both workers see
    source = f"""
    import builtins
    builtins.began.append(None)
    one, kept = len(builtins.began) - 1, []
    loader, held_out = DataLoader(Numbers(48), batch_size=2, shuffle=True), DataLoader(Numbers(6), batch_size=2)
    def some():
        batches = iter(loader)
        for _ in range(7):
            train(*next(batches))
        if {keeps}:
            kept.append(batches)
    for epoch in range(4):
        seen.append([])
        some()
        {EVALUATION.strip().replace(chr(10), chr(10) + "    ") if evaluates else ""}
        model.train()
    """
    one, other = run_program(tmp_path, monkeypatch, source, rule=rule)
    assert one["model"].weight.tolist() == other["model"].weight.tolist()
    assert [len(batches) for batches in one["seen"]] == ([7, 3] if evaluates else [7]) * 4
