# SPDX-License-Identifier: Apache-2.0
"""One worker's side of zero lines, in this process: what is attached, split, shown and refused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.errors import UnsupportedError
from paceline.run.attach import attach
from paceline_plugins.zero.attachment import Zero
from paceline_plugins.zero.patches import Patches
from paceline_plugins.zero.rank_discovery import ZeroWorker
from paceline_plugins.zero.refusals import Refusal
from paceline_plugins.zero.reporter import Reporter
from tests.doors.zero.programs import each, virtual
from tests.helpers import make_data, make_net, same_bits, sgd, state_of


def place(size: int = 1, random_data: bool = False) -> ZeroWorker:
    """Of the first of so many workers; what attaches is alone all the same."""
    return ZeroWorker(0, size, 0, None, random_data)


@contextlib.contextmanager
def zero_lines(here: ZeroWorker | None = None) -> Iterator[Zero]:
    here = here or place()
    zero = Zero(Path(__file__), here, Reporter(here))
    with Patches() as patches:
        zero.install(patches)
        yield zero
        if zero.run is not None:
            zero.run.close()


def loader(samples: int = 48, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(make_data(samples), batch_size=8, shuffle=shuffle)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def program() -> dict[str, torch.Tensor]:
    """An ordinary one."""
    model = make_net(dropout=0.1, norm=True)
    optimizer = sgd(model.parameters())
    training, held_out = loader(), loader(16, shuffle=False)
    for _ in range(2):
        model.train()
        for x, y in training:
            step(model, optimizer, x, y)
        model.eval()
        with torch.no_grad():
            for x, _ in held_out:
                model(x)
    return state_of(model)


def test_one_worker_is_the_program_bit_for_bit(capsys: pytest.CaptureFixture[str]) -> None:
    plain = program()
    with zero_lines() as zero:
        assert same_bits(program(), plain)
        assert zero.run is not None and zero.run.minibatches == 12
    assert same_bits(program(), plain)  # and all hooks are gone
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("paceline: one worker under auto(): Sequential (99 trained numbers) and its SGD")
    assert "48 samples, for training" in said[1] and "16 samples, for evaluation" in said[2] and len(said) == 3


def test_a_loader_in_evaluation_is_whole_and_one_that_made_no_step_is_refused() -> None:
    with zero_lines(place(2)) as zero:
        model, data = make_net(), loader()
        optimizer = sgd(model.parameters())
        for x, y in data:
            step(model, optimizer, x, y)
        assert zero.run is not None
        with torch.no_grad():
            for x, _ in data:
                model(x)
        with pytest.raises(
            Refusal, match=r"(?s)48 samples with the model in training mode and made no step.*6 batches"
        ):
            for x, _ in data:
                model(x)


@pytest.mark.parametrize("random_data", [False, True])
def test_steps_without_a_loader(random_data: bool) -> None:
    with zero_lines(place(2, random_data)) as zero:
        model = make_net()
        optimizer = sgd(model.parameters())
        about = (
            contextlib.nullcontext()
            if random_data
            else pytest.raises(Refusal, match=r"(?s)SGD steps, and no Data.*2 w")
        )
        with about:
            step(model, optimizer, torch.randn(4, 6), torch.zeros(4, dtype=torch.long))
        assert zero.run is not None


def test_optimizers_that_cannot_be_served() -> None:
    with zero_lines():
        model = make_net()
        pair = torch.optim.Adam(model.parameters()), sgd(model.parameters())
        with pytest.raises(Refusal, match=r"Adam and SGD both train one parameter of shape \(\d+, 6\)"):
            model(torch.randn(1, 6))
        del pair
    with zero_lines():
        model = make_net()
        around = sgd(model.parameters())
        around.inner = torch.optim.Adam(model.parameters())  # type: ignore[attr-defined]
        with pytest.raises(
            Refusal, match=r"can be attached; add these two lines.*\n.*attach\(model, optimizer.inner\)"
        ):
            model(torch.randn(1, 6))
        del around
    with zero_lines():
        nobody = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
        with pytest.raises(Refusal, match=r"a tensor of shape \(3,\) that no torch module has"):
            nobody.step()


def test_before_the_next_phase_the_model_of_the_last_one_is_evaluated() -> None:
    with zero_lines() as zero:
        model = make_net()
        before = sgd(model.parameters())
        for x, y in loader():
            step(model, before, x, y)
        behind = torch.optim.Adam(make_net().parameters())
        model.eval()
        with torch.no_grad():
            model(torch.randn(1, 6))
        assert zero._view is not None and zero._view._inside is not None, "the global parameters"
        del behind


def test_optimizers_that_come_or_step_at_the_wrong_time() -> None:
    with zero_lines():
        model = make_net()
        optimizer = sgd(model.parameters())
        batches = iter(loader())
        step(model, optimizer, *next(batches))
        later = torch.optim.Adam(model.parameters())
        with pytest.raises(Refusal, match="Adam steps, which was made in the middle of a pass"):
            step(model, later, *next(batches))
        del batches
    with zero_lines():
        first, second = make_net(), make_net()
        before = sgd(first.parameters())
        for x, y in loader():
            step(first, before, x, y)
        behind = torch.optim.Adam(second.parameters())
        batches = iter(loader())
        step(second, behind, *next(batches))
        with pytest.raises(Refusal, match="SGD steps again, after another optimizer was made"):
            step(first, before, *next(batches))
        del batches


INNER_LOOP = """
    import copy
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for (tasks,) in DataLoader(TensorDataset(torch.randn(12, 4, 2)), batch_size=2, shuffle=True):
            optimizer.zero_grad()
            for x in tasks:
                learner = MODULE
                inner = torch.optim.SGD(learner.parameters(), lr=0.1)
                for _ in range(2):
                    inner.zero_grad()
                    learner(x).sum().backward()
                    inner.step()
                for p, q in zip(model.parameters(), learner.parameters()):
                    p.grad = q.grad if p.grad is None else p.grad + q.grad
            optimizer.step()
    torch.save(model.state_dict(), "model.pt")
"""


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=2)", "asgd"])
def test_an_optimizer_of_a_copy_within_a_pass_is_a_workers_own(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_RULE", rule)
    monkeypatch.chdir(tmp_path)
    virtual(tmp_path, INNER_LOOP.replace("MODULE", "copy.deepcopy(model)"))
    assert same_bits(*(torch.load(path) for path in each(tmp_path, "model.pt")))
    said = capsys.readouterr().err
    assert said.count("SGD trains a copy of Sequential that was made within a pass") == 1
    with pytest.raises(Refusal, match=r"train.py:\d+: SGD steps, which was made in the middle of a pass"):
        virtual(tmp_path, INNER_LOOP.replace("MODULE", "nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1))"))
    made = "learner = MODULE\n                inner = torch.optim.SGD(learner.parameters(), lr=0.1)\n"
    before = (
        "learner = copy.deepcopy(model)\n    inner = torch.optim.SGD(learner.parameters(), lr=0.1)\n    optimizer ="
    )
    kept = INNER_LOOP.replace(made, "learner.load_state_dict(model.state_dict())\n").replace("optimizer =", before, 1)
    with pytest.raises(Refusal, match=r"train.py:\d+: the program trains two models Sequential, and loads weights"):
        virtual(tmp_path, kept)


def test_a_program_that_attaches_is_left_alone() -> None:
    import paceline

    with zero_lines(place(2)) as zero:
        model = make_net()
        optimizer = sgd(model.parameters())
        with paceline.attach(model, optimizer, "bmuf"):
            for x, y in loader():
                step(model, optimizer, x, y)
        assert zero.run is None


def test_a_program_that_evaluates_first_is_attached_outside_of_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []

    def noting(*about: Any, **settings: Any) -> Any:
        modes.append(torch.is_inference_mode_enabled())
        return attach(*about, **settings)

    monkeypatch.setattr("paceline_plugins.zero.attachment.attach", noting)
    with zero_lines() as zero:
        model = make_net()
        optimizer = sgd(model.parameters())
        model.eval()
        with torch.inference_mode():
            for x, _ in loader(16, shuffle=False):
                model(x)
        model.train()
        for x, y in loader():
            step(model, optimizer, x, y)
        assert modes == [False] and zero.run is not None and zero.run.minibatches == 6


class Ahead:
    """Stands for the global model of a run of several workers: all zeros."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.global_parts = model, [self]
        self.fragment, self.numel = self, 0
        self.tensors = list(model.parameters())
        self.anchor = self.exported = torch.zeros(1)

    def refresh(self) -> None: ...

    def write(self, begin: int, end: int, values: torch.Tensor) -> None:
        for tensor in self.tensors:
            tensor.zero_()


@contextlib.contextmanager
def attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Zero, nn.Module, torch.optim.Optimizer]]:
    """A model in training, whose global model is all zeros."""
    with zero_lines(place(2)) as zero:
        model = make_net()
        optimizer = sgd(model.parameters())
        x, y = next(iter(loader()))
        step(model, optimizer, x, y)
        assert zero.run is not None
        monkeypatch.setattr(type(zero.run._state), "global_model", Ahead(model))
        yield zero, model, optimizer
        monkeypatch.undo()


def zeros(state: dict[str, torch.Tensor]) -> bool:
    return all(not value.any() for value in state.values())


def test_evaluation_sees_the_global_model_and_training_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with attached(monkeypatch) as (_, model, optimizer):
        own = [p.detach().clone() for p in model.parameters()]
        x, y = torch.randn(4, 6), torch.zeros(4, dtype=torch.long)
        with torch.no_grad():
            assert model(x).any()  # in training mode: statistics, a target
        model.eval()
        assert model(x).any()  # with gradients: an adversary, a saliency map
        with torch.inference_mode():
            assert not model(x).any()
        assert model(x).any() and all(torch.equal(a, b) for a, b in zip(own, model.parameters(), strict=True))
        with torch.no_grad():
            assert not model[0](x).any()
        step(model, optimizer, x, y)
        assert not any(torch.equal(a, b) for a, b in zip(own, model.parameters(), strict=True))


@pytest.mark.parametrize("reads", ["state", "save", "evaluation"])
def test_a_thread_that_reads_the_model_while_it_trains_swaps_nothing(
    reads: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = {
        "state": lambda model: model.state_dict(),
        "save": lambda model: torch.save(list(model.parameters()), tmp_path / "model.pt"),
        "evaluation": lambda model: model(torch.randn(4, 6)),
    }[reads]
    found: list[bool] = []

    def beside(model: nn.Module) -> None:
        with torch.no_grad():
            read(model)
        found.append(zeros({name: p for name, p in model.named_parameters()}))

    with attached(monkeypatch) as (_, model, optimizer):
        batches = iter(loader())
        for x, y in batches:
            step(model, optimizer, x, y)
            model.eval()
            other = threading.Thread(target=beside, args=(model,))
            other.start()
            other.join()
            model.train()
            break
        assert found == [False]
        del batches  # the pass is over
        model.eval()
        other = threading.Thread(target=beside, args=(model,))
        other.start()
        other.join()
        assert found == [False, reads != "save"]  # it is swapped back behind it


def test_weights_of_the_programs_own_stay_for_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    with attached(monkeypatch) as (zero, model, optimizer):
        best = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
        model.load_state_dict(best)
        model.eval()
        with torch.no_grad():
            assert model(torch.ones(1, 6)).any() and same_bits(model.state_dict(), best)
        monkeypatch.setattr(zero._loaders, "split", True)
        with pytest.raises(Refusal, match="loaded other weights into the model, and now trains on from them"):
            step(model, optimizer, torch.randn(4, 6), torch.zeros(4, dtype=torch.long))


def test_a_refusal_is_an_error_of_paceline_and_ends_with_what_to_add() -> None:
    with zero_lines(place(2)):
        model = make_net()
        optimizer = sgd(model.parameters())
        with pytest.raises(UnsupportedError) as caught:
            step(model, optimizer, torch.randn(4, 6), torch.zeros(4, dtype=torch.long))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("test_attachment.py:") and lines[0].endswith("add these two lines to the program:")
    assert "paceline.attach(model, optimizer)" in lines[1] and "run.share(batches)" in lines[2] and len(lines) == 3
