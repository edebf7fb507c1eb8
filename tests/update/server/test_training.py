# SPDX-License-Identifier: Apache-2.0
"""Training under asynchronous rules with virtual workers: models, optimizers and programs as users have them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import paceline
from paceline import UnsupportedError
from paceline.forecast.sim import Clock, exponential
from paceline.rules.outer import Sum
from paceline.rules.payload import Delta
from paceline.rules.rule import Rule
from paceline.rules.schedule import Bounded
from paceline.rules.topology import Sharded
from tests.helpers import Place, Program, adam, attached, make_net, momentum_sgd, rank, same_bits, sgd, state_of
from tests.update.server.programs import RECIPES, Numbers, finite, lines, simulate

Optimizers = Callable[[Any], torch.optim.Optimizer]


def rules(names: list[str] = RECIPES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rule", names)


def slow_sgd(params: Any) -> torch.optim.Optimizer:
    """SGD at a rate for several pushes at a time."""
    return torch.optim.SGD(params, lr=0.04, momentum=0.3)


# -- identities --------------------------------------------------------------------------------------------------------
def test_ssp_without_staleness_has_the_bits_of_sync() -> None:
    """With clipping and momentum."""

    def clip(place: Place) -> None:
        clip_grad_norm_(place.model.parameters(), 0.5)

    one, other = (
        simulate(Program(rule, optimizer=momentum_sgd, before_step=clip, schedule=True), 3)
        for rule in ("ssp(staleness=0)", "sync(reproducible=True)")
    )
    assert same_bits(one[0].model, other[0].model)
    assert [o.losses for o in one] == [o.losses for o in other]


@rules()
def test_one_worker_is_the_users_program(rule: str) -> None:
    choices: dict[str, Any] = {"optimizer": momentum_sgd, "dropout": 0.2, "norm": True, "schedule": True}
    outs = [simulate(Program(r, **choices), 1)[0] for r in (rule, "sync()")]
    assert same_bits(outs[0].model, outs[1].model) and outs[0].losses == outs[1].losses
    assert same_bits(outs[0].model, outs[0].exported) and outs[0].bytes_sent == 0


@pytest.mark.parametrize("optimizer", [momentum_sgd, adam])
@pytest.mark.parametrize("rule", ["asgd(overlap=0, piece=64)", "dc_asgd(kind='adaptive', overlap=0)"])
def test_workers_that_take_turns_are_one_program(rule: str, optimizer: Optimizers) -> None:
    """Nobody pushes between another's pull and push: the serial program on the same batches, bit for bit."""
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(12)]

    def step(model: nn.Module, opt: torch.optim.Optimizer, k: int) -> None:
        opt.zero_grad()
        nn.functional.cross_entropy(model(batches[k][0]), batches[k][1]).backward()
        opt.step()

    model = make_net()
    serial = optimizer(model.parameters())
    for k in range(12):
        step(model, serial, k)

    def program() -> Any:
        with attached(make_net(), rule, optimizer) as (run, model, opt):
            turn = torch.zeros(1)
            if rank() == 0:
                for k in range(6):
                    step(model, opt, k)
                run.messages.send(turn, to=1).wait()
            else:
                run.messages.receive(turn, source=0).wait()
                for k in range(6, 12):
                    if k == 6:  # it has the model of the beginning, and nothing was pushed by it that an answer came to
                        for stream in run._engine._clients:  # type: ignore[union-attr]
                            stream.pull(peeks=False)
                            stream.write_pulled()
                    step(model, opt, k)
        return state_of(model)

    for state in simulate(program, 2, Clock()):
        assert same_bits(state, state_of(model))


# -- all end alike, and have learned -----------------------------------------------------------------------------------
@rules()
def test_all_workers_end_with_the_same_bits(rule: str) -> None:
    """That is what is exported; and the parameters of the workers were apart on the way."""

    def after(place: Place) -> None:
        if place.run.minibatches == 7:
            place.extra["state"] = state_of(place.model)

    outs = simulate(Program(rule, optimizer=slow_sgd, norm=True, dropout=0.2, samples=62, after_step=after), 3)
    for out in outs:
        assert same_bits(out.model, outs[0].model) and same_bits(out.exported, outs[0].model)
    assert finite(outs[0].model)
    assert not same_bits(outs[0].extra["state"], outs[1].extra["state"])
    assert int(outs[0].model["1.num_batches_tracked"]) == outs[0].minibatches


@rules()
def test_the_quadratic(rule: str) -> None:
    """Workers see minima of their own, whose mean is the answer."""
    workers = 4
    scales, answer = torch.tensor([1.0, 0.5, 0.2, 0.1]), torch.tensor([1.0, -2.0, 3.0, 0.5])

    def program() -> float:
        offset = 0.2 * (rank() - (workers - 1) / 2) * torch.tensor([1.0, -1.0, 1.0, -1.0])
        model = Numbers(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if "easgd" in rule else 0.3)
        with paceline.attach(model, optimizer, rule):
            fall = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
            for _ in range(240):
                optimizer.zero_grad()
                (scales * (model.p - answer - offset) ** 2).sum().backward()
                optimizer.step()
                fall.step()
        return float((scales * (model.p.detach() - answer) ** 2).sum())

    finals = simulate(program, workers, Clock(exponential(), 0.1, seed=3))
    assert len(set(finals)) == 1
    assert finals[0] < (0.5 if rule.startswith(("adadelay", "easgd")) else 0.2), "from 4.8"


# -- the global model --------------------------------------------------------------------------------------------------
def test_the_global_model_is_what_was_pulled_last() -> None:
    def program() -> list[tuple[float, float, float, float]]:
        with attached(Numbers(), "asgd(overlap=0)", lr=1.0) as (run, model, optimizer):
            seen = []
            for _ in range(3):
                model.p.grad = torch.full((1,), -1.0)
                optimizer.step()
                with run.global_model() as inside:
                    assert inside is model
                    held = model.value
                exported = run.model_for_export()
                assert exported is not model
                seen.append((model.value, held, float(run.global_state()["p"]), exported.value))
        return seen

    found = simulate(program, 2, Clock())
    assert [row[0] for row in found[0]] == [1.0, 3.0, 5.0]
    assert all(len(set(row)) == 1 for rows in found for row in rows)


def test_the_global_model_of_elastic_averaging_is_the_center() -> None:
    """As this worker has moved it; in the `with` alone, and the worker's own parameters afterwards."""

    def program() -> list[tuple[float, float, float]]:
        with attached(Numbers(), "easgd(period=1, beta=1.0, overlap=0)", lr=1.0) as (run, model, optimizer):
            seen = []
            for _ in range(2):
                model.p.grad = torch.full((1,), -4.0)
                optimizer.step()
                with run.global_model():
                    held = model.value
                seen.append((model.value, held, run.model_for_export().value))
        seen.append((model.value, model.value, run.model_for_export().value))
        return seen

    # worker 0: 4 and 0 -> 2, 2; worker 1: 4 and 2 -> 3, 3; worker 0: 6 and 3 -> 4.5; worker 1: 7 and 4.5 -> 5.75
    end = (5.75, 5.75, 5.75)
    want = [[(2.0, 2.0, 2.0), (4.5, 4.5, 4.5), end], [(3.0, 3.0, 3.0), (5.75, 5.75, 5.75), end]]
    assert simulate(program, 2, Clock()) == want


def test_between_blocks_the_global_model_is_not_the_workers() -> None:
    def after(place: Place) -> None:
        if place.run.minibatches == 6:
            own = state_of(place.model)
            with place.run.global_model() as model:
                held = state_of(model)
            assert same_bits(own, state_of(place.model)) and not same_bits(own, held)
            assert same_bits(held, place.run.global_state())
            assert same_bits(held, state_of(place.run.model_for_export()))

    simulate(Program("asgd(period=4)", optimizer=slow_sgd, norm=True, after_step=after), 3)


# -- several optimizers and groups -------------------------------------------------------------------------------------
class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(3, 4), nn.Linear(4, 1)


@rules(["asgd()", "asgd(overlap=0)", "ssp(staleness=1)", "dc_asgd()", "asgd(period=2)", "easgd(period=2)"])
@pytest.mark.parametrize("every", [1, 3])
def test_two_optimizers_that_step_in_turn(rule: str, every: int, tmp_path: Path) -> None:
    """The critic at every minibatch, the generator (the last, which closes a minibatch) at every third."""

    def program() -> Any:
        model = Pair()
        critic = torch.optim.SGD(model.critic.parameters(), lr=0.02, momentum=0.5)
        generator = torch.optim.Adam(model.generator.parameters(), lr=0.01)
        with paceline.attach(model, [critic, generator], rule, log=tmp_path / "log") as run:
            torch.manual_seed(rank())
            for step in range(12):
                critic.zero_grad()
                generator.zero_grad()
                model.critic(model.generator(torch.randn(4, 3))).square().mean().backward()
                critic.step()
                if step % every == every - 1:
                    generator.step()
            assert run.minibatches == 12 // every
        return state_of(model), run.blocks

    found = simulate(program, 3)
    assert all(same_bits(state, found[0][0]) for state, _ in found) and finite(found[0][0])
    start = state_of(Pair())
    assert all(not torch.equal(found[0][0][name], start[name]) for name in start)
    if rule == "asgd(overlap=0)":
        assert [blocks for _, blocks in found] == [12] * 3


def test_the_pushes_of_two_optimizers_do_not_count_for_each_other() -> None:
    """Each has versions of its own: alone at its shards, a worker has no delay, whatever its other optimizer does."""

    def program() -> Any:
        model = nn.ModuleList([Numbers(), Numbers()])
        pair = [torch.optim.SGD(part.parameters(), lr=rate) for part, rate in zip(model, (1.0, 0.5), strict=True)]
        with paceline.attach(model, pair, "staleness_aware(overlap=0)"):
            for _ in range(4):
                for part, optimizer in zip(model, pair, strict=True):
                    part.p.grad = torch.full((1,), -1.0 if rank() == 0 else 0.0)
                    if rank() == 0:
                        optimizer.step()
        return [part.value for part in model]

    assert simulate(program, 2) == [[4.0, 2.0]] * 2


@pytest.mark.parametrize(("rule", "found"), [("asgd(overlap=0)", 0.2), ("asgd(overlap=0, rescaled=True)", 0.5)])
def test_rescaled_pushes_count_the_data_of_slow_workers_alike(rule: str, found: float) -> None:
    """Each worker's loss is (p - rank)^2 / 2, and the second one is four times slower."""

    def program() -> float:
        model = Numbers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with paceline.attach(model, optimizer, rule, data="own") as run:
            for _ in range(2000 if run.world.rank == 0 else 500):
                model.p.grad = model.p.detach() - run.world.rank
                optimizer.step()
        return model.value

    outs = paceline.simulate(program, 2, clock=paceline.Clock(compute=[1.0, 4.0], network=1e-3))
    assert outs[1] == pytest.approx(found, abs=0.03)


@rules(["asgd(overlap=0)", "asgd(period=2)"])
def test_groups_with_rates_and_schedules_of_their_own(rule: str) -> None:
    def program() -> list[float]:
        model = nn.ModuleList([Numbers(), Numbers(), Numbers()])
        groups = [{"params": [model[1].p], "lr": 0.5}, {"params": [model[0].p]}, {"params": [model[2].p], "lr": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda k: 0.5**k, lambda k: 1.0, lambda k: 1.0])
        with paceline.attach(model, optimizer, rule):
            for _ in range(4):
                for part in model:
                    part.p.grad = torch.full((1,), -1.0)
                optimizer.step()
                scheduler.step()
        return [part.value for part in model]

    assert simulate(program, 2) == [[8.0, 2 * 0.5 * 1.875, 0.0]] * 2


# -- parameters --------------------------------------------------------------------------------------------------------
@rules(["asgd()", "asgd(period=2)", "easgd(period=2)"])
def test_frozen_parameters_stay(rule: str) -> None:
    def program() -> Any:
        model = make_net()
        model[0].weight.requires_grad_(False)
        start = state_of(model)
        with attached(model, rule, slow_sgd) as (_, _, optimizer):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().sum().backward()
                optimizer.step()
        return [torch.equal(model.state_dict()[name], start[name]) for name in start]

    assert simulate(program, 2) == [[True, False, False, False]] * 2


@pytest.mark.parametrize("kind", ["none", "zero"])
def test_a_parameter_without_a_gradient_has_one_of_zero(kind: str) -> None:
    """A push covers a whole span, so that owners count the same updates everywhere; momentum goes on, as with zeros."""

    def program() -> list[float]:
        model = nn.ModuleList([Numbers(), Numbers()])
        with attached(model, "asgd(overlap=0)", partial(torch.optim.SGD, lr=1.0, momentum=0.5)) as (_, _, optimizer):
            seen = []
            for step in range(3 if rank() == 0 else 0):
                model[0].p.grad = torch.full((1,), -1.0)
                model[1].p.grad = torch.full((1,), -1.0) if step == 0 else None if kind == "none" else torch.zeros(1)
                had = model[1].p.grad
                optimizer.step()
                assert model[1].p.grad is had, "the user's gradients are where they were"
                seen += [model[0].value, model[1].value]
        return seen

    assert simulate(program, 2)[0] == [1.0, 1.0, 2.5, 1.5, 4.25, 1.75]


def test_gradients_are_hidden_from_the_step_and_there_afterwards() -> None:
    def program() -> list[bool]:
        with attached(Numbers(3), "asgd()", lr=1.0) as (_, model, optimizer):
            model.p.grad = torch.ones(3)
            own = model.p.grad
            seen: list[bool] = []
            optimizer.register_step_pre_hook(lambda *about: seen.append(model.p.grad is None))
            optimizer.step()
            kept = model.p.grad is own and torch.equal(own, torch.ones(3)) and not optimizer.state
        return [*seen, kept]

    assert simulate(program, 2) == [[True, True]] * 2


def test_channels_last_weights_lie_in_the_order_of_their_memory() -> None:
    def program(form: torch.memory_format) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 4 * 4, 2)).to(memory_format=form)
        assert model[0].weight.is_contiguous(memory_format=form)
        with attached(model, "asgd(piece=64)", torch.optim.Adam, lr=0.01) as (run, _, optimizer):
            torch.manual_seed(rank())
            for _ in range(6):
                optimizer.zero_grad()
                model[0].weight.grad = torch.randn(5, 3, 3, 3)  # in another order than the weight
                model[2].weight.grad = torch.randn(2, 80)
                optimizer.step()
                with run.global_model():
                    pass
        assert model[0].weight.is_contiguous(memory_format=form)
        return {name: value.contiguous() for name, value in run.model_for_export().state_dict().items()}

    one, other = (
        simulate(
            partial(program, form), 3, Clock()
        )  # else an element's owner, so the order of its pushes, would differ
        for form in (torch.contiguous_format, torch.channels_last)
    )
    assert all(same_bits(state, one[0]) for state in [*one, *other])


@rules(["asgd()", "asgd(period=3)", "easgd(period=3)", "ssp(staleness=2)", "dc_asgd()"])
def test_a_model_in_bf16_has_an_outer_state_in_fp32(rule: str) -> None:
    def after(place: Place) -> None:
        shards = place.run._engine._shards.server.shards.values()  # type: ignore[union-attr]
        place.extra["dtypes"] = {shard.anchor.dtype for shard in shards}
        place.extra["own"] = {p.dtype for p in place.model.parameters()}

    fine, coarse = (
        simulate(Program(rule, optimizer=sgd, dtype=dtype, samples=96, after_step=after), 2)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert coarse[1].extra == {"dtypes": {torch.float32}, "own": {torch.bfloat16}}
    assert same_bits(coarse[0].model, coarse[1].model)
    assert max(float((fine[0].model[k] - coarse[0].model[k].float()).abs().max()) for k in fine[0].model) < 0.05


def test_small_steps_of_a_bf16_model_add_up_at_the_owner() -> None:
    """1 + 2^-10 is 1 in bf16; sixteen of them are not lost."""

    def program() -> tuple[float, float]:
        with attached(Numbers(1, 1.0).bfloat16(), "asgd(overlap=0)", lr=2.0**-10) as (_, model, optimizer):
            first = 0.0
            for step in range(16):
                model.p.grad = torch.full((1,), -1.0, dtype=torch.bfloat16)
                optimizer.step()
                first = first if step else model.value
        return first, model.value

    assert simulate(program, 2) == [(1.0, 1.03125)] * 2


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_block_of_a_bf16_model_sends_its_steps_once(overlap: int) -> None:
    """Each step of 2^-3 is exact at 1, and what rounding makes of the model is no progress."""
    rule = Rule(Bounded(period=2, overlap=overlap), Delta("keep"), topology=Sharded(), outer=Sum())

    def program() -> float:
        with attached(Numbers(1, 1.0).bfloat16(), rule, lr=2.0**-6) as (_, model, optimizer):
            for step in range(8):
                model.p.grad = torch.full((1,), -8.0 if step < 4 else 0.0, dtype=torch.bfloat16)
                optimizer.step()
        return model.value

    assert simulate(program, 2) == [2.0] * 2


def test_a_group_whose_parameters_have_no_elements() -> None:
    def program() -> float:
        model = nn.ModuleList([Numbers(), Numbers(0)])
        optimizer = torch.optim.SGD([{"params": [part.p]} for part in model], lr=0.5)
        with paceline.attach(model, optimizer, "dc_asgd()"):
            model[0].p.grad = torch.full((1,), -1.0)
            model[1].p.grad = torch.zeros(0)
            optimizer.step()
        return model[0].value

    found = simulate(program, 2, Clock())
    assert found[0] == found[1] and 0.9 < found[0] < 1.0


def test_parameters_of_two_dtypes_in_one_group() -> None:
    def program() -> list[float]:
        model = nn.ModuleList([Numbers(), Numbers().double(), Numbers().bfloat16()])
        with attached(model, "dc_asgd()", lr=0.5) as (_, _, optimizer):
            for _ in range(3):
                for part in model:
                    part.p.grad = torch.full_like(part.p, -1.0)
                optimizer.step()
        return [float(part.p.detach()) for part in model]

    found = simulate(program, 2)
    assert found[0] == found[1] and all(2.0 < value < 4.0 for value in found[0])


# -- buffers -----------------------------------------------------------------------------------------------------------
@rules(["asgd()", "asgd(period=2)", "ssp(staleness=1)", "easgd(period=2)"])
def test_running_means_stay_between_those_of_the_workers(rule: str) -> None:
    """Workers see data of different spread; the global running variance lies between theirs, whatever the rate."""

    def program() -> Any:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=0.5))
        with attached(model, rule, lr=1e-3) as (run, _, optimizer):
            own, seen = [], []
            for step in range(12):
                optimizer.zero_grad()
                model(torch.randn(64, 3) * (1 + rank())).square().sum().backward()
                own.append(model[1].running_var.clone())
                optimizer.step()
                assert torch.equal(own[-1], model[1].running_var), "a worker's own statistics are its own on the way"
                seen.append(run.model_for_export()[1].running_var.clone())
                assert int(model[1].num_batches_tracked) == step + 1
        return own, seen, state_of(model)

    found = simulate(program, 3)
    every = torch.stack([x for own, _, _ in found for x in own] + [torch.ones(2)])
    low, high = every.min(0).values, every.max(0).values
    for _, seen, end in found:
        assert same_bits(end, found[0][2])
        assert all(bool((low <= x).all() and (x <= high).all()) for x in [*seen, end["1.running_var"]])
        assert int(end["1.num_batches_tracked"]) == 12
    last = torch.stack([own[-1] for own, _, _ in found])
    assert bool((last[0] < found[0][2]["1.running_var"]).all() and (found[0][2]["1.running_var"] < last[2]).all())


@rules(["asgd()", "asgd(period=2)", "easgd(period=2)"])
def test_a_batch_of_nan_does_not_stay_in_the_running_mean(rule: str) -> None:
    """It has been through the BatchNorm of that worker before anybody could look at its gradient."""

    def program() -> Any:
        with attached(make_net(norm=True), rule, slow_sgd) as (_, model, optimizer):
            torch.manual_seed(rank())
            for step in range(10):
                optimizer.zero_grad()
                x = torch.randn(8, 6)
                if rank() == 1 and step == 3:
                    x[0, 0] = float("nan")
                model(x).square().sum().backward()
                optimizer.step()
            own = state_of(model)
        return own, state_of(model)

    found = simulate(program, 2)
    for own, end in found:
        assert finite(end) and same_bits(end, found[0][1])
        assert finite(own), "the worker's own statistics begin again from the global ones"


# -- workers with less to do, or with inf and nan ----------------------------------------------------------------------
@rules(["asgd()", "asgd(period=4)", "ssp(staleness=1)", "ssp(staleness=1, period=2)", "easgd(period=3)", "dc_asgd()"])
@pytest.mark.parametrize("steps", [[3, 20, 20], [20, 0, 7]])
def test_workers_that_finish_early(rule: str, steps: list[int]) -> None:
    """The others go on, however far behind the one that is done has been."""

    def program() -> Any:
        with attached(Numbers(300), rule, lr=0.5) as (run, model, optimizer):
            for _ in range(steps[rank()]):
                model.p.grad = torch.full((300,), -1.0)
                optimizer.step()
            made = run.minibatches
        return made, state_of(model)

    found = simulate(program, 3, Clock([1.0, 0.7, 1.3], 0.1))
    assert [made for made, _ in found] == steps
    assert all(same_bits(state, found[0][1]) for _, state in found)
    assert float(found[0][1]["p"][0]) > 0
    if rule in ("asgd(period=4)", "asgd()", "dc_asgd()"):
        assert found[0][1]["p"].tolist() == [0.5 * sum(steps)] * 300 or rule == "dc_asgd()"


@rules([r for r in RECIPES if "period" in r])
@pytest.mark.parametrize("optimizer", [sgd, momentum_sgd, adam])
def test_a_worker_whose_parameters_are_nan_begins_again_from_the_global_model(
    rule: str, optimizer: Optimizers, caplog: pytest.LogCaptureFixture
) -> None:
    def factor(place: Place) -> float:
        return float("nan") if place.rank == 1 and place.run.minibatches == 5 else 1.0

    with caplog.at_level(logging.WARNING, logger="paceline"):
        outs = simulate(Program(rule, optimizer=optimizer, samples=96, factor=factor), 3)
    assert all(same_bits(out.model, outs[0].model) for out in outs) and finite(outs[0].model)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 1 and said[0].startswith("the contribution of worker 1 on"), said
    assert all(loss == loss for loss in outs[1].losses[-6:]), "it goes on"


@rules(["ssp(staleness=1)", "ssp(staleness=1, period=2)"])
def test_a_worker_with_nan_does_not_hold_up_the_others(rule: str, tmp_path: Path) -> None:
    """Its clock goes on: else all would wait for it, and a save, to which all come, for ever."""

    def program() -> int:
        with attached(Numbers(100), rule, lr=0.5) as (run, model, optimizer):
            for step in range(12):
                model.p.grad = torch.full((100,), float("nan") if rank() == 1 and 2 <= step < 10 else -1.0)
                optimizer.step()
            run.save(tmp_path / "c")
            blocks = run.blocks
        assert finite(state_of(model)) and model.value > 0
        return blocks

    assert simulate(program, 3) == [12 if "period" not in rule else 6] * 3


# -- mixed precision and what is refused -------------------------------------------------------------------------------
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("known", [False, True])
@rules(["asgd(overlap=0)", "asgd(period=2)", "ssp(staleness=1)"])
def test_steps_that_a_scaler_skips(rule: str, known: bool, fused: bool) -> None:
    """Each worker skips by itself, and what it pushes is in the gradients' own scale."""

    def program() -> Any:
        model = Numbers(64)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        with paceline.attach(model, optimizer, rule, **({"scaler": scaler} if known else {})) as run:
            scales = []
            for step in range(6):
                optimizer.zero_grad()
                loss = scaler.scale(-model.p.sum())
                (loss * float("inf") if rank() == 1 and step in (1, 2) else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
            made = run.minibatches
        return made, scales[-1], model.value

    share = 0.5 if rule.startswith("ssp") else 1.0
    if rule.startswith("ssp") and not known:  # a step that it skips is a clock that others wait for
        with pytest.raises(UnsupportedError, match="Give the scaler to paceline"):
            simulate(program, 2, Clock())
        return
    found = simulate(program, 2, Clock())
    assert [(made, scale) for made, scale, _ in found] == [(6, 8.0), (4, 2.0)]
    assert found[0][2] == found[1][2]
    if share == 1.0:
        assert found[0][2] == 10.0
    else:  # who finishes first leaves the rest to the other, at full weight
        assert 5.0 <= found[0][2] <= 7.0


@pytest.mark.parametrize("fused", [False, True])
@rules(["ssp(staleness=1)", "ssp(staleness=1, period=2)"])
def test_a_worker_whose_scaler_skips_does_not_hold_up_the_others(rule: str, fused: bool, tmp_path: Path) -> None:
    """Where the scaler is known, the worker's clock counts what was skipped, and all meet at the save."""

    def program() -> Any:
        model = nn.ModuleList([Numbers(), Numbers()])
        pair = [torch.optim.SGD(part.parameters(), lr=1.0, fused=fused) for part in model]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
        with paceline.attach(model, list(pair), rule, scaler=scaler) as run:
            for step in range(8):
                for optimizer in pair:
                    optimizer.zero_grad()
                loss = scaler.scale(-(model[0].p + model[1].p).sum())
                (loss * float("inf") if rank() == 1 and step < 4 else loss).backward()
                for optimizer in pair:
                    scaler.step(optimizer)
                scaler.update()
            run.save(tmp_path / "c")
            made, blocks = run.minibatches, run.blocks
        assert "step" not in scaler.__dict__
        return made, blocks, [part.value for part in model]

    found = simulate(program, 2)
    pushes = 8 if rule == "ssp(staleness=1)" else 4
    assert [(made, blocks) for made, blocks, _ in found] == [(8, pushes), (4, pushes)]
    assert found[0][2] == found[1][2] and found[0][2][0] == found[0][2][1] > 0


def test_a_closure_is_refused_where_gradients_are_pushed() -> None:
    def program(rule: str) -> float:
        with attached(Numbers(), rule, lr=1.0) as (_, model, optimizer):

            def closure() -> float:
                model.p.grad = torch.full((1,), -1.0)
                return 0.0

            optimizer.step(closure)
        return model.value

    with pytest.raises(UnsupportedError, match=r"SGD.step\(closure\) computes gradients inside the step"):
        simulate(partial(program, "asgd()"), 2)
    assert simulate(partial(program, "asgd(period=2)"), 2) == [2.0] * 2


def test_optimizers_that_cannot_step_on_slices_are_refused_with_the_reason() -> None:
    def program(make: Callable[[Any], torch.optim.Optimizer], rule: str) -> None:
        model = nn.Linear(3, 2)
        paceline.attach(model, make(model.parameters()), rule).close()

    class Mine(torch.optim.SGD):
        """Not known to be element-wise."""

    with pytest.raises(UnsupportedError, match=r"LBFGS computes gradients inside its step.* use a rule that"):
        simulate(partial(program, torch.optim.LBFGS, "asgd()"), 2)
    with pytest.raises(UnsupportedError, match=r"Mine is not known to treat every number alike; use one of .*AdamW"):
        simulate(partial(program, lambda p: Mine(p, lr=0.1), "ssp()"), 2)
    with pytest.raises(UnsupportedError, match=r"SparseAdam wants sparse gradients"):
        simulate(partial(program, lambda p: torch.optim.SparseAdam(list(p)), "asgd()"), 2)
    simulate(partial(program, lambda p: Mine(p, lr=0.1), "asgd(period=2)"), 2)


def test_a_sparse_gradient_is_refused() -> None:
    def program() -> None:
        with attached(nn.Embedding(5, 2, sparse=True), "asgd()", lr=0.1) as (_, model, optimizer):
            model(torch.tensor([1, 2])).sum().backward()
            optimizer.step()

    with pytest.raises(UnsupportedError, match=r"weight has a sparse gradient, which has no flat form; use sparse=Fal"):
        simulate(program, 2)


# -- messages, no_sync, the log ----------------------------------------------------------------------------------------
@rules(["asgd()", "ssp(staleness=1)", "easgd(period=2)"])
def test_messages_between_workers_at_different_places(rule: str) -> None:
    def program() -> Any:
        with attached(Numbers(70), rule, lr=0.1) as (run, model, optimizer):
            said: list[float] = []
            for step in range(9):
                model.p.grad = torch.full((70,), -1.0)
                optimizer.step()
                if step == 4:
                    run.messages.send(torch.tensor([float(rank())]), to=(rank() + 1) % 3).wait()
                if step == 7:
                    x = torch.zeros(1)
                    run.messages.receive(x, source=(rank() - 1) % 3).wait()
                    said.append(float(x))
                    total = torch.tensor([1.0 + rank()])
                    run.messages.all_reduce(total).wait()
                    said.append(float(total))
        return said, model.value

    found = simulate(program, 3, Clock([1.0, 2.0, 3.0]))
    assert [said for said, _ in found] == [[2.0, 6.0], [0.0, 6.0], [1.0, 6.0]]
    assert len({value for _, value in found}) == 1


@rules(RECIPES)
def test_the_log_counts_each_push_once(rule: str, tmp_path: Path) -> None:
    """With its delay; and a worker's pushes are what `run.blocks` says."""

    def factor(place: Place) -> float:
        return float("nan") if place.rank == 1 and place.run.minibatches == 3 else 1.0

    def blocks(place: Place) -> None:
        place.extra["run"] = place.run

    outs = simulate(
        Program(rule, optimizer=sgd, norm=True, settings={"log": tmp_path}, factor=factor, after_step=blocks), 3
    )
    for worker, out in enumerate(outs):
        events = lines(tmp_path, worker, "exchange")
        delays = [event.get("delays", {}) for event in events]  # a line of nothing new has none
        told = sum(count for one in delays for count in one.values())
        refused = sum(event.get("refused", 0) for event in events)
        assert all(int(delay) >= 0 for one in delays for delay in one)
        assert sum(event["bytes"] for event in events) <= out.bytes_sent
        assert sum(event["minibatches"] for event in events) == 8
        assert refused == (worker == 1)
        sent = out.extra["run"].blocks
        assert told == sent - (refused if rule.startswith("ssp") else 0)
        assert sent >= (8 if "period" not in rule else 2) - 2 * refused - 2
        assert events[-1]["block"] == sent


def test_the_logs_delays_match_the_updates_that_the_owners_have_applied(tmp_path: Path) -> None:
    """One number, so that there is one shard: every push but the first of all finds those before it."""
    workers, made = 3, 10

    def program() -> int:
        with attached(Numbers(), "asgd(overlap=0)", lr=1.0, log=tmp_path) as (run, model, optimizer):
            for _ in range(made):
                model.p.grad = torch.full((1,), -1.0)
                optimizer.step()
        return run.blocks

    assert simulate(program, workers) == [made] * workers
    total = 0
    for worker in range(workers):
        for event in lines(tmp_path, worker, "exchange"):
            total += sum(int(delay) * count for delay, count in event["delays"].items())
    # the delay of a push: the others' pushes since its worker's last; so each push counts once for each other worker
    # that pushes again
    assert made * workers * (workers - 1) - workers * (workers - 1) * 3 <= total <= made * workers * (workers - 1)
