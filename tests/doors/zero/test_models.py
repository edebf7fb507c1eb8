# SPDX-License-Identifier: Apache-2.0
"""What a program reads from its model and writes into it, by state dictionaries and by hand."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.run.run import Run
from paceline_plugins.zero.models import GlobalView
from paceline_plugins.zero.refusals import Refusal
from tests.doors.zero.programs import each, virtual
from tests.helpers import same_bits
from tests.tables import each_value_fast

TRAINING = """
    import copy
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(1)
    x = torch.randn(48, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def train(optimizer, inside=lambda: None):
        model.train()
        for a, b in loader:
            optimizer.zero_grad()
            (model(a) - b).square().mean().backward()
            optimizer.step()
            inside()

    def evaluate():
        model.eval()
        with torch.no_grad():
            return model(x).sum().item()

    def sgd(rate=0.05):
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)

    def plain():
        return {name: value.clone() for name, value in model.state_dict().items()}

"""


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, rule: str = "bmuf(period=4)", workers: int = 2
) -> list[Path]:
    """What each worker saved as `saved.pt`."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PACELINE_RULE", rule)
    virtual(folder, TRAINING + source, workers)
    return each(folder, "saved.pt", workers)


def saved(places: list[Path]) -> list[dict[str, torch.Tensor]]:
    return [torch.load(place, weights_only=True) for place in places]


@pytest.mark.parametrize("rule", ["bmuf(period=4)", "averaging(period=5)", "sync"])
def test_what_was_loaded_last_is_what_is_saved_behind_the_next_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    source = """
    train(sgd())
    best = copy.deepcopy(model.state_dict())
    train(sgd())
    model.load_state_dict(best)
    second = nn.Linear(4, 1)
    head, model = model, second
    train(sgd())
    own = {n: p.data for n, p in head.named_parameters()}
    torch.save({"best": best, "head": head.state_dict(), "own": own}, "saved.pt")
    """
    for found in map(torch.load, run(tmp_path, monkeypatch, source, rule)):
        assert same_bits(found["head"], found["best"])
        assert all(torch.equal(value, found["best"][name]) for name, value in found["own"].items())


@pytest.mark.parametrize(
    "write",
    [
        "state = model.state_dict(); state['0.weight'].mul_(0.5)",
        "[value.mul_(0.5) for value in model.state_dict().values() if value.is_floating_point()]",
        "model[0].weight.data.mul_(0.5)",
        "model[0].weight.data = model[0].weight.data * 0.5",
        "evaluate(); model[0].weight.data.copy_(model[0].weight.data.flip(0))",
    ],
)
def test_what_is_written_behind_a_pass_is_saved_and_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    source = f"""
    optimizer = sgd()
    train(optimizer)
    with torch.no_grad():
        {write}
    torch.save({{"weight": model[0].weight.detach().clone()}}, "written.pt")
    print(evaluate())
    torch.save(model.state_dict(), "saved.pt")
    train(optimizer)
    """
    with pytest.raises(Refusal, match="loaded other weights into the model"):
        run(tmp_path, monkeypatch, source)
    first = saved(each(tmp_path, "saved.pt"))[0]
    assert torch.equal(first["0.weight"], torch.load(tmp_path / "written.pt")["weight"])


def test_a_mean_of_weights_is_evaluated_and_taken_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries do it: parameters are stored, others copied in, and the stored ones put back."""
    source = """
    optimizer, found = sgd(), []

    def averaged():
        stored = [p.data.clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.fill_(0.25)
        model.eval()
        with torch.no_grad():
            model(x)
        found.append([p.data.clone() for p in model.parameters()])
        for p, value in zip(model.parameters(), stored):
            p.data.copy_(value)
        model.train()

    train(optimizer, averaged)
    averaged()
    train(optimizer)
    torch.save(found, "saved.pt")
    """
    for path in run(tmp_path, monkeypatch, source):
        found = torch.load(path)
        assert len(found) == 7 and all((value == 0.25).all() for row in found for value in row)


AVERAGED = """
    optimizer, ema = sgd(), plain()

    def excursion(load):
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                ema[name].mul_(0.9).add_(value, alpha=0.1)
        keep = {keep}
        load(ema)
        seen = {{name: value.clone() for name, value in model.named_parameters()}}
        found.append((evaluate(), all(torch.equal(seen[name], ema[name]) for name in seen)))
        load(keep)
        model.train()

    def by_hand(state):
        with torch.no_grad():
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                value.copy_(state[name])

    found = []
    for epoch in range(3):
        {training}
    torch.save([found, plain()], "saved.pt")
"""
EXCURSIONS = {
    "none": "train(optimizer)",
    "after a pass": "train(optimizer); excursion(model.load_state_dict)",
    "in a pass": "train(optimizer, lambda: excursion(model.load_state_dict))",
    "by hand": "train(optimizer); excursion(by_hand)",
}
EXCURSION_RULES = ["sync", "averaging(period=5)", "bmuf(period=4)", "diloco", "easgd(period=3)", "asgd"]


@pytest.mark.parametrize(("rule", "kind"), each_value_fast(EXCURSION_RULES, ["after a pass", "in a pass", "by hand"]))
def test_weights_that_are_put_back_are_no_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, kind: str
) -> None:
    """A mean of weights is loaded, evaluated, and the old ones are loaded again: training ends as without that."""
    keeps = {"by hand": "plain()"}

    def ended(kind: str) -> list[Any]:
        source = AVERAGED.format(keep=keeps.get(kind, "copy.deepcopy(model.state_dict())"), training=EXCURSIONS[kind])
        return [torch.load(place) for place in run(tmp_path, monkeypatch, source, rule)]

    for (seen, weights), (_, without) in zip(ended(kind), ended("none"), strict=True):
        assert seen and all(is_mean for _, is_mean in seen)
        assert same_bits(weights, without)


def test_what_is_read_behind_a_pass_is_the_global_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    optimizer = sgd()
    train(optimizer)
    whole = copy.deepcopy(model)
    read = [p.detach().clone() for p in model.parameters()]
    state = list(model.state_dict().values())
    torch.save({"copy": [p.data for p in whole.parameters()], "read": read, "state": state}, "saved.pt")
    """
    first, second = map(torch.load, run(tmp_path, monkeypatch, source))
    for one in (first, second):
        for name in ("copy", "read"):
            assert all(torch.equal(a, b) for a, b in zip(one[name], first["copy"], strict=True))
    assert torch.equal(first["copy"][0], first["state"][0])


def test_a_checkpoint_leaves_each_worker_its_own_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its modules have modules inside; else the global parameters would be swapped in, and seen as a change."""
    monkeypatch.setenv("PACELINE_CHECKPOINT", str(tmp_path / "steps"))
    monkeypatch.setenv("PACELINE_CHECKPOINT_EVERY", "1")
    source = (
        "optimizer = sgd()\n    for _ in range(3): train(optimizer); evaluate()\n    torch.save(plain(), 'saved.pt')"
    )
    run(tmp_path, monkeypatch, f"    {source}\n", "bmuf(period=3)")
    assert len(list((tmp_path / "steps").iterdir())) > 1
    assert [record for record in caplog.records if "the program changes" in record.getMessage()] == []


# -- moving averages of the program's own ---------------------------------------------------------

AVERAGES = {"in place": ("a.lerp_(p, 0.1)", 1), "behind .data": ("a.data.mul_(0.9).add_(p.data, alpha=0.1)", 2)}
"""What updates an average, and after how many passes the message can be there."""
NAMED = "moving average of the model that the program makes"


@pytest.mark.parametrize("seen", ["evaluated", "saved"])
@pytest.mark.parametrize("how", list(AVERAGES))
def test_a_moving_average_of_a_worker_s_own_parameters_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str, seen: str
) -> None:
    update, passes = AVERAGES[how]
    look = (
        "[average.eval()(x) for _ in range(2)]"
        if seen == "evaluated"
        else "torch.save(average.state_dict(), 'average.pt')"
    )

    def said(rule: str, inside: str = "update", behind: str = "None") -> int:
        source = f"""
    optimizer = sgd()
    average = copy.deepcopy(model).requires_grad_(False)
    pairs = list(zip(average.parameters(), model.parameters()))
    @torch.no_grad()
    def update():
        for a, p in pairs:
            {update}
    for _ in range({passes}):
        train(optimizer, {inside})
        {behind}
        with torch.no_grad():
            {look}
    torch.save(model.state_dict(), "saved.pt")
"""
        run(tmp_path, monkeypatch, source, rule)
        return capsys.readouterr().err.count(NAMED)

    assert [said(rule) for rule in ("bmuf(period=4)", "asgd", "sync")] == [1, 1, 0]
    assert said("bmuf(period=4)", inside="lambda: None") == 0  # a frozen reference
    assert said("bmuf(period=4)", inside="lambda: None", behind="update()") == 0  # of global models


def test_a_thread_that_reads_the_model_swaps_nothing_before_a_pass_and_while_it_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would exchange the parameters under the hands of the thread that trains."""
    merge, initialise, beside = Run.merge, GlobalView.__init__, []
    views: list[GlobalView] = []

    def look() -> None:
        reader = threading.Thread(target=lambda: beside.append([view.beside_training for view in views]))
        reader.start()
        reader.join()

    def merging(run: Run) -> None:
        look()
        merge(run)

    def made(view: GlobalView, *rest: Any) -> None:
        initialise(view, *rest)
        views.append(view)
        look()

    monkeypatch.setattr(Run, "merge", merging)
    monkeypatch.setattr(GlobalView, "__init__", made)
    run(tmp_path, monkeypatch, "    train(sgd())\n    torch.save(plain(), 'saved.pt')\n", "asgd")
    assert len(beside) == 4 and all(all(one) for one in beside)


def test_a_batch_waits_for_no_exchange_in_flight() -> None:
    """Before each batch the worker's own parameters come back, if they were away; the global ones would wait."""

    class Touched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"read {name} of the run")

    view = object.__new__(GlobalView)
    view.run, view.loaded_at = Touched(), ""  # type: ignore[assignment]
    view._inside, view._replaced = None, ([], [])
    view.leave()
