# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that another number of workers goes on from, under rules whose workers exchange together."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from paceline import checkpoint
from paceline.checkpoint import loading
from paceline.checkpoint.files import own_sum
from paceline.checkpoint.reshard import OldCheckpoint, mean_optimizers
from paceline.errors import CheckpointError, UnsupportedError
from paceline.rules.outer import BlockMomentum
from paceline.update.engine.blocks import saved as saved_blocks
from tests.helpers import State, adam, attached, follow, same_bits, sgd, state_of
from tests.tables import dealt

Make = Callable[[Any], torch.optim.Optimizer]


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum, at a rate that 7 workers bear."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def rank() -> int:
    """Of this virtual worker; 0 where there is none."""
    found = paceline.communication.virtual.transport.current()
    return found.world.rank if found is not None else 0


def batch_of(worker: int, step: int) -> Tensor:
    """8 samples that belong to a worker and a step."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * worker + step))


@dataclass
class Seen:
    """What a worker saw."""

    start: State = field(default_factory=dict)
    own: State = field(default_factory=dict)
    minibatches: int = 0
    lr: float = 0.0
    blocks: int = 0
    blocks_at_the_end: int = 0
    losses: list[float] = field(default_factory=list)
    final: State = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Quadratic:
    """Fit half of the input by a net with BatchNorm; saves at the end, or resumes at the start."""

    rule: str
    optimizer: Make = momentum_sgd
    steps: int = 7
    resume: Path | None = None
    save: Path | None = None
    norm: bool = True
    dtype: torch.dtype = torch.float32
    settings: dict[str, Any] = field(default_factory=dict)
    look: Callable[[paceline.Run, torch.optim.Optimizer], dict[str, Any]] | None = None

    def __call__(self) -> Seen:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if self.norm else []), nn.Linear(8, 3)]
        model = nn.Sequential(*layers).to(self.dtype)
        optimizer = self.optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
        with paceline.attach(model, optimizer, self.rule, **self.settings) as run:
            if self.resume is not None:
                run.resume(self.resume, scheduler=scheduler)
            seen = Seen(run.global_state(), state_of(model), run.minibatches, scheduler.get_last_lr()[0], run.blocks)
            if self.look is not None:
                seen.extra = self.look(run, optimizer)
            for _ in range(self.steps):
                x = batch_of(run.world.rank, run.minibatches).to(self.dtype)
                optimizer.zero_grad()
                loss = (model(x).float() - 0.5 * x[:, :3].float()).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                seen.losses.append(loss.item())
            if self.save is not None:
                run.save(self.save, scheduler=scheduler)
            seen.blocks_at_the_end = run.blocks
        seen.final = state_of(model)
        return seen


def simulate(target: Callable[[], Any], workers: int, hosts: str | None = None) -> list[Any]:
    torch.manual_seed(5)
    return list(paceline.simulate(target, workers, hosts=list(hosts) if hosts else None))


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


# -- every rule --------------------------------------------------------------------------------------------------------

RULES: list[tuple[str, Make]] = [
    ("sync", momentum_sgd),
    ("sync(codec='int8')", momentum_sgd),
    ("ssp(staleness=0)", momentum_sgd),
    ("one_bit(warmup=2)", momentum_sgd),
    ("power(rank=1, warmup=2)", momentum_sgd),
    ("top_k(ratio=0.3, warmup=0, momentum=0.5)", sgd),
    ("one_bit_adam(warmup=3)", adam),
    ("averaging(period=3)", momentum_sgd),
    ("averaging(period=3, warmup=4)", momentum_sgd),
    ("averaging(period=3, warmup=10)", momentum_sgd),
    ("averaging(period=3, overlap=2, codec='one_bit')", momentum_sgd),
    ("bmuf(period=3)", momentum_sgd),
    ("bmuf(period=3, ema=0.6)", momentum_sgd),
    ("bmuf_adam(period=3, ramp=2)", adam),
    ("bmuf(period=3, local_state='average')", momentum_sgd),
    ("bmuf(period=4, overlap=3, fragments=2)", momentum_sgd),
    ("bmuf_adam(period=3)", adam),
    ("bmuf_adam(period=4, overlap=3, fragments=2)", adam),
    ("diloco(period=3)", adam),
    ("streaming_diloco(period=4, fragments=2)", adam),
    ("bmuf(period=3, within='host')", momentum_sgd),
    ("bmuf_adam(period=3, warmup=2, within='host')", adam),
]
SIZES = [(4, 3), (1, 4), (4, 1)]


@pytest.mark.parametrize(("rule", "optimizer", "old", "new"), dealt(RULES, SIZES))
def test_another_number_goes_on(rule: str, optimizer: Make, old: int, new: int, tmp_path: Path) -> None:
    """The global model is the saved one bit for bit; workers agree, at every exchange and at the end; it gets better.

    7 steps are in the middle of a block, and behind it where there is overlap.
    """
    hosts = "aabbccc" if "within" in rule else None
    before = simulate(Quadratic(rule, optimizer, save=tmp_path / "c"), old, hosts[:old] if hosts else None)
    after = simulate(Quadratic(rule, optimizer, 40, resume=tmp_path / "c"), new, hosts[:new] if hosts else None)
    saved = load_file(tmp_path / "c" / "global.safetensors")
    for one in after:
        assert same_bits(one.start, saved)
        assert same_bits(one.final, after[0].final)
        assert one.minibatches == 7 and one.lr == pytest.approx(before[0].lr * 0.9)
    first, last = (mean([one.losses[k] for one in after]) for k in (0, -1))
    assert last < 0.5 * mean([one.losses[0] for one in before]) and last < first


@pytest.mark.parametrize(("rule", "optimizer"), dealt(RULES[::2], [()]))
def test_who_has_taken_over_can_be_stopped_again(rule: str, optimizer: Make, tmp_path: Path) -> None:
    """4 saved, 3 went on, saved and went on: who resumes there on 3 has their bits."""
    hosts = "aabb" if "within" in rule else None
    simulate(Quadratic(rule, optimizer, save=tmp_path / "four"), 4, hosts)
    first = Quadratic(rule, optimizer, 5, resume=tmp_path / "four", save=tmp_path / "three")
    simulate(first, 3, hosts[:3] if hosts else None)
    whole = simulate(Quadratic(rule, optimizer, 11, resume=tmp_path / "four"), 3, hosts[:3] if hosts else None)
    again = simulate(Quadratic(rule, optimizer, 6, resume=tmp_path / "three"), 3, hosts[:3] if hosts else None)
    assert [one.losses for one in again] == [one.losses[5:] for one in whole]
    assert all(same_bits(one.final, two.final) for one, two in zip(again, whole, strict=True))


@pytest.mark.parametrize(("old", "new"), [("aaa", "aabb"), ("aabb", "aaa"), ("aab", "bbaacc"), ("abc", "aabb")])
@pytest.mark.parametrize("rule", ["bmuf(period=3, within='host')", "bmuf_adam(period=3, warmup=4, within='host')"])
def test_other_hosts(rule: str, old: str, new: str, tmp_path: Path) -> None:
    """A host alone is one synchronous worker, without blocks; blocks begin where there are several, and end so."""
    make = adam if "adam" in rule else momentum_sgd
    simulate(Quadratic(rule, make, save=tmp_path / "c"), len(old), old)
    after = simulate(Quadratic(rule, make, 20, resume=tmp_path / "c"), len(new), new)
    saved = load_file(tmp_path / "c" / "global.safetensors")
    assert all(same_bits(one.start, saved) and same_bits(one.final, after[0].final) for one in after)
    assert mean([one.losses[-1] for one in after]) < mean([one.losses[0] for one in after])


@pytest.mark.parametrize("rule", ["bmuf(period=3)", "bmuf(period=4, overlap=3)"])
def test_the_outer_state_of_16_bit_models_keeps_its_32_bits(rule: str, tmp_path: Path) -> None:
    def anchors(run: paceline.Run, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        assert run._state.blocks is not None
        return {"anchor": run._state.blocks.updates[0].state.parameters[0].anchor.clone()}

    choices: dict[str, Any] = {"norm": False, "dtype": torch.bfloat16}
    simulate(Quadratic(rule, sgd, save=tmp_path / "c", **choices), 4)
    kept = load_file(tmp_path / "c" / "rank-000.safetensors")
    want = next(v for k, v in kept.items() if k.endswith("/anchor"))
    assert not torch.equal(want, want.bfloat16().float())
    for one in simulate(Quadratic(rule, sgd, resume=tmp_path / "c", look=anchors, **choices), 3):
        assert torch.equal(one.extra["anchor"], want)


@pytest.mark.parametrize("new", [1, 3, 7])
@pytest.mark.parametrize(
    "rule", ["sync", "bmuf(period=3)", "diloco(period=4, local_state='average')", "asgd(piece=64)", "easgd(period=3)"]
)
def test_several_models_and_optimizers(rule: str, new: int, tmp_path: Path) -> None:
    """Each optimizer has its own exchanges, pieces and clock."""

    def program(resume: bool) -> Any:
        torch.manual_seed(0)
        models = {"one": nn.Linear(6, 20), "two": nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, 3))}
        optimizers = [momentum_sgd(models["one"].parameters()), adam(models["two"].parameters())]
        with paceline.attach(models, optimizers, rule) as run:
            if resume:
                run.resume(tmp_path / "c")
            start = run.global_state()
            for step in range(run.minibatches, run.minibatches + 5):
                loss = models["two"](models["one"](batch_of(rank(), step))).square().mean()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
            if not resume:
                run.save(tmp_path / "c")
        return start, run.global_state(), [optimizer.state_dict() for optimizer in optimizers]

    simulate(partial(program, False), 4)
    saved = load_file(tmp_path / "c" / "global.safetensors")
    found = simulate(partial(program, True), new)
    for start, final, _ in found:
        assert same_bits(start, saved) and same_bits(final, found[0][1])
    assert len(saved) == 9 and (new > 1 or all(len(kept["state"]) > 1 for kept in found[0][2]))


def test_only_the_files_that_are_needed_are_read(tmp_path: Path) -> None:
    """In lockstep all hold what rank 0 holds; the fourth's tensors tell nothing to three."""
    simulate(Quadratic("sync", save=tmp_path / "c"), 4)
    (tmp_path / "c" / "rank-003.safetensors").unlink()
    after = simulate(Quadratic("sync", resume=tmp_path / "c"), 3)
    assert all(same_bits(one.start, load_file(tmp_path / "c" / "global.safetensors")) for one in after)


# -- against the same by hand ------------------------------------------------------------------------------------------
def by_hand(path: Path) -> nn.Sequential:
    """The global model of a checkpoint, without paceline."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    model.load_state_dict(load_file(path / "global.safetensors"))
    return model


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    x = batch_of(worker, step)
    loss: Tensor = (model(x) - 0.5 * x[:, :3]).square().mean()
    return loss


def assert_close(one: State, other: State) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def read_back(path: Path) -> OldCheckpoint:
    return OldCheckpoint(checkpoint.read_manifest(path), lambda name, key: torch.empty(0))


@pytest.mark.parametrize("new", [1, 3, 7])
def test_synchronous_momentum_goes_on_as_one_process_would(new: int, tmp_path: Path) -> None:
    path = tmp_path / "c"
    simulate(Quadratic("sync", save=path, norm=False), 4)
    after = simulate(Quadratic("sync", steps=8, resume=path, norm=False), new)

    model = by_hand(path)
    optimizer = momentum_sgd(model.parameters())
    optimizer.load_state_dict(read_back(path).part(0, "optimizers", 0))
    assert len(optimizer.state) == 4
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    scheduler.load_state_dict(read_back(path).part(0, "included", "scheduler"))
    for step in range(7, 15):
        follow(optimizer, torch.stack([loss_of(model, worker, step) for worker in range(new)]).mean())
        scheduler.step()
    assert_close(after[0].final, state_of(model))


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("gain", ["auto", "paper", 2.0])
def test_block_momentum_goes_on_with_its_delta_and_the_new_gain(gain: Any, overlap: int, tmp_path: Path) -> None:
    """theta^init = theta + eta Delta with the saved Delta and the eta of 3 workers; then 2 blocks by hand."""
    path, period, lr = tmp_path / "c", 3, 0.05
    rule = f"bmuf(period={period}, gain={gain!r}, overlap={overlap})"
    make: Make = lambda parameters: torch.optim.SGD(parameters, lr=lr)  # noqa: E731
    simulate(Quadratic(rule, make, save=path, norm=False), 4)
    taken_over = rule.replace(f", overlap={overlap}", ", overlap=0")
    if overlap:  # at the save a result is on its way; what follows is easier by hand without
        file = path / "manifest.json"
        manifest = json.loads(file.read_text().replace(f"overlap={overlap}", "overlap=0"))
        file.write_text(json.dumps({**manifest, "sum": own_sum(manifest)}))
    after = simulate(Quadratic(taken_over, make, 2 * period, resume=path, norm=False), 3)

    outer_step = BlockMomentum(gain=gain)
    zeta = outer_step.lr_at(1, 3)
    outer = read_back(path).part(0, "exchange", "blocks", 0, "outer")
    theta, delta = (outer[f"parameters/float32/0/{name}"] for name in ("anchor", "delta"))
    assert float(delta.abs().max()) > 0
    step = 7
    for block in (3, 4):  # two had begun to be exchanged before the save
        eta = outer_step.momentum_at(block, 3)
        start = theta + eta * delta
        ends = []
        for worker in range(3):
            model = by_hand(path)
            nn.utils.vector_to_parameters(start.clone(), model.parameters())
            for k in range(step, step + period):
                gradients = torch.autograd.grad(loss_of(model, worker, k), list(model.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter.sub_(lr * 0.9 ** (k // 5) * gradient)
            ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        delta = eta * delta + zeta * (torch.stack(ends).mean(0) - start)
        theta, step = theta + delta, step + period
    final = torch.cat([after[0].final[name].flatten() for name in ("0.weight", "0.bias", "1.weight", "1.bias")])
    torch.testing.assert_close(final, theta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["one_bit(warmup=5)", "top_k(ratio=0.3, warmup=3)", "sync(codec='int8', warmup=9)"])
def test_a_warm_up_of_the_codec_is_not_begun_again(rule: str, tmp_path: Path) -> None:
    """After 7 steps, what a step sends is what the 8th sends, among as many."""

    def sent(run: paceline.Run, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        (update,) = run._engine.gradient_exchanges.updates  # type: ignore[union-attr]
        codec = update.codec.at(update.exchanges)
        return {"codec": codec, "residuals": [key for chunk in update.buckets.chunks for key in chunk.state]}

    simulate(Quadratic(rule, sgd, save=tmp_path / "c"), 4)
    want = paceline.rule_from_text(rule).codec.at(7)
    for one in simulate(Quadratic(rule, sgd, 3, resume=tmp_path / "c", look=sent), 3):
        assert one.extra == {"codec": want, "residuals": []}


# -- what optimizers begin with ----------------------------------------------------------------------------------------
def optimizer_state(run: paceline.Run, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of what the optimizer keeps of its first parameter."""
    return {k: v.clone() for k, v in optimizer.state[optimizer.param_groups[0]["params"][0]].items()}


@pytest.mark.parametrize("new", [1, 3])
def test_an_optimizer_that_steps_on_the_workers_gets_their_mean(new: int, tmp_path: Path) -> None:
    simulate(Quadratic("diloco(period=3)", adam, save=tmp_path / "c"), 4)
    old = read_back(tmp_path / "c")
    states = [old.part(r, "optimizers", 0)["state"][0] for r in range(4)]
    assert not torch.equal(states[0]["exp_avg"], states[1]["exp_avg"])
    for one in simulate(Quadratic("diloco(period=3)", adam, 0, resume=tmp_path / "c", look=optimizer_state), new):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            want = torch.stack([state[name] for state in states]).double().mean(0).float()
            torch.testing.assert_close(one.extra[name], want)


def test_compensated_moments_are_those_of_the_start_of_the_block(tmp_path: Path) -> None:
    """7 steps at period 3: one is undone, with its moments and its count."""
    rule = "bmuf_adam(period=3)"

    def init(run: paceline.Run, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if run._state.blocks is None:
            return {}
        return {"at 6": saved_blocks.save(run._state.blocks), **optimizer_state(run, optimizer)}

    simulate(Quadratic(rule, adam, save=tmp_path / "c", norm=False), 4)
    block = read_back(tmp_path / "c").part(0, "exchange", "blocks", 0)
    wanted = {k.split(".")[0]: v for k, v in block["outer"].items() if k.endswith("/init")}
    assert set(wanted) == {"exp_avg", "exp_avg_sq"}
    for one in simulate(Quadratic(rule, adam, 0, resume=tmp_path / "c", norm=False, look=init), 3):
        for name, flat in wanted.items():
            assert torch.equal(one.extra[name].flatten(), flat[: one.extra[name].numel()])
        assert float(one.extra["step"]) == pytest.approx(block["numbers"]["counts"][0])


def test_momentum_that_restarts_with_each_block_restarts(tmp_path: Path) -> None:
    rule = "bmuf(period=3, local_state='reset')"
    simulate(Quadratic(rule, save=tmp_path / "c"), 4)
    for one in simulate(Quadratic(rule, steps=0, resume=tmp_path / "c", look=optimizer_state), 3):
        assert float(one.extra["momentum_buffer"].abs().max()) == 0
    for one in simulate(Quadratic(rule, steps=0, resume=tmp_path / "c", look=optimizer_state), 1):
        assert float(one.extra["momentum_buffer"].abs().max()) > 0


def test_what_came_behind_the_next_block_is_counted(tmp_path: Path) -> None:
    """The outer state holds it at the save; so do rho, the number of blocks and Adam's count, as if it had landed."""
    rule, found = "bmuf_adam(period=4, overlap=3, gain='paper')", {}

    def numbers(run: paceline.Run, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        assert run._state.blocks is not None
        return copy.deepcopy(saved_blocks.numbers(run._state.blocks.updates[0]))

    def program() -> None:
        with attached(nn.Linear(6, 3), rule, adam) as (run, model, optimizer):
            for step in range(12):
                follow(optimizer, loss_of(model, rank(), step))
                if step == 9:  # 8 minibatches are on their way, and land after the 11th
                    run.save(tmp_path / "c")
                    before = numbers(run, optimizer)
            found.update(numbers(run, optimizer) if rank() == 0 else {})
            assert before["block"] == 1

    simulate(program, 4)

    def again() -> dict[str, Any]:
        with attached(nn.Linear(6, 3), rule, adam) as (run, _, optimizer):
            run.resume(tmp_path / "c")
            seen = numbers(run, optimizer)
        return seen

    for one in simulate(again, 3):
        for name in ("block", "rho", "counts"):
            assert one[name] == found[name], name
        assert one["block"] == 2 and one["ahead"] != found["ahead"]


def test_means_over_those_who_have_something(tmp_path: Path) -> None:
    """A worker without a gradient keeps nothing; one with nan is left out; equal numbers stay as they are."""

    def program() -> None:
        model = nn.ParameterList([torch.zeros(2), torch.zeros(3)]).double()
        optimizer = momentum_sgd(model.parameters())
        run = paceline.attach(model, optimizer, "diloco(period=9)")
        model[0].grad = torch.full((2,), 0.1, dtype=torch.float64)
        if rank():
            model[1].grad = torch.full((3,), float(rank()), dtype=torch.float64)
        optimizer.step()
        if rank() == 2:
            optimizer.state[model[1]]["momentum_buffer"].fill_(float("nan"))
        run.save(tmp_path / "c")
        run.abandon()

    simulate(program, 7)
    (found,) = mean_optimizers(read_back(tmp_path / "c"))
    assert torch.equal(found["state"][0]["momentum_buffer"], torch.full((2,), 0.1, dtype=torch.float64))
    assert torch.equal(
        found["state"][1]["momentum_buffer"], torch.full((3,), 19 / 5, dtype=torch.float64)
    )  # of 1, 3, 4, 5, 6


# -- generators, data, objects -----------------------------------------------------------------------------------------
def test_ranks_keep_their_generators_and_new_ones_have_their_own(tmp_path: Path) -> None:
    def program(resume: bool) -> list[float]:
        with attached(nn.Linear(2, 2), "averaging(period=4)") as (run, *_):
            if resume:
                run.resume(tmp_path / "c")
            else:
                torch.rand(3 + rank())
                run.save(tmp_path / "c")
            drawn: list[float] = torch.rand(4).tolist()
        return drawn

    before = simulate(partial(program, False), 4)
    assert simulate(partial(program, True), 3) == before[:3]
    seven = simulate(partial(program, True), 7)
    assert seven[:4] == before and len({tuple(row) for row in seven}) == 7
    assert simulate(partial(program, True), 7) == seven


# -- what does not fit -------------------------------------------------------------------------------------------------
def refused(
    path: Path, workers: int, rule: str = "bmuf_adam(period=3)", model: nn.Module | None = None, **objects: Any
) -> list[str]:
    """What each worker is told; fails where something was changed."""
    kind = type(model) if model is not None else None

    def body() -> str:
        torch.manual_seed(1)
        own = kind() if kind is not None else Net()
        optimizer = adam(own.parameters())
        run = paceline.attach(own, optimizer, rule)
        before, generator = state_of(own), torch.get_rng_state()
        try:
            with pytest.raises((CheckpointError, UnsupportedError)) as caught:
                run.resume(path, **objects)
            assert same_bits(state_of(own), before) and same_bits(run.global_state(), before)
            assert not optimizer.state and run.minibatches == 0 and torch.equal(torch.get_rng_state(), generator)
        finally:
            run.abandon()
        return str(caught.value)

    return simulate(body, workers)


class Net(nn.Sequential):
    """What was saved."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Wider(nn.Sequential):
    """Another shape."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))


class Frozen(Net):
    """The same shape, of which less is trained."""

    def __init__(self) -> None:
        super().__init__()
        self[2].bias.requires_grad_(False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    def program() -> None:
        with attached(Net(), "bmuf_adam(period=3)", adam) as (run, model, optimizer):
            for step in range(4):
                follow(optimizer, loss_of(model, rank(), step))
            run.save(tmp_path / "c")

    simulate(program, 4)
    return tmp_path / "c"


@pytest.mark.parametrize("new", [1, 3, 7])
@pytest.mark.parametrize("name", ["rank-003.json", "rank-002.safetensors", "global.safetensors"])
def test_a_missing_or_damaged_file_is_named_on_all(name: str, new: int, saved: Path) -> None:
    data = bytearray((saved / name).read_bytes())
    data[len(data) // 2] ^= 1
    (saved / name).write_bytes(data)
    assert all(f"{name} is damaged" in text for text in refused(saved, new))
    (saved / name).unlink()
    assert all(f"{name} is missing" in text for text in refused(saved, new))


@pytest.mark.parametrize("new", [1, 3])
def test_what_does_not_fit_is_refused_on_all_and_changes_nothing(new: int, saved: Path) -> None:
    for text in refused(saved, new, model=Wider()):
        assert "0.bias has the shape (9,) here and (8,) in the checkpoint" in text
    for text in refused(saved, new, rule="bmuf_adam(period=4)"):
        assert "made under the rule bmuf_adam(period=3)" in text
    for text in refused(saved, new, scheduler=torch.optim.lr_scheduler.StepLR(adam(Net().parameters()), 5)):
        assert "scheduler stand in one of them only" in text
    for text in refused(saved, 3, model=Frozen()):
        assert "does not fit what is exchanged: parameters/float32/0/anchor has 96 elements here and 99" in text


def test_other_groups_are_refused(saved: Path) -> None:
    def body() -> str:
        model = Net()
        groups = [{"params": [*model[0].parameters()]}, {"params": [*model[1].parameters(), *model[2].parameters()]}]
        run = paceline.attach(model, adam(groups), "bmuf_adam(period=3)")
        with pytest.raises(CheckpointError) as caught:
            run.resume(saved)
        run.abandon()
        return str(caught.value)

    for text in simulate(body, 3):
        assert "their groups have [[2, 4]] parameters here and [[6]] in the checkpoint" in text


def test_hosts_with_different_checkpoints(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As hosts with disks of their own may have."""
    read = checkpoint.read_manifest

    def other(path: Path) -> dict[str, Any]:
        manifest = read(path)
        return {**manifest, "size": 3} if rank() == 2 else manifest

    monkeypatch.setattr(loading, "read_manifest", other)
    for text in refused(saved, 3):
        assert "find different checkpoints" in text and "rank 2" in text
