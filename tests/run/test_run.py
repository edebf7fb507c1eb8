# SPDX-License-Identifier: Apache-2.0
"""The face, and the things that people do in a training loop."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from tests.helpers import (
    Place,
    adam,
    attached,
    descend,
    follow,
    make_data,
    make_net,
    momentum_sgd,
    same_bits,
    sgd,
    simulate,
    state_of,
    train,
)


def rank() -> int:
    found = paceline.communication.virtual.transport.current()
    return 0 if found is None else found.world.rank


def steps(model: nn.Module, optimizer: Any, count: int, seed: int | None = None) -> None:
    torch.manual_seed(rank() if seed is None else seed)
    for _ in range(count):
        descend(model, optimizer, torch.randn(4, 6))


def agree(states: list[dict[str, torch.Tensor]]) -> bool:
    return all(same_bits(state, states[0]) for state in states)


# -- the end of a run --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["sync", "averaging(period=3)", "bmuf_adam(period=3)"])
def test_an_unreferenced_run_works_and_is_closed_at_exit(rule: str) -> None:
    def program() -> nn.Module:
        model = make_net()
        optimizer = adam(model.parameters())
        paceline.attach(model, optimizer, rule)
        gc.collect()
        steps(model, optimizer, 4)
        return model

    assert agree([state_of(m) for m in simulate(program, 3)])


def test_with_closes_and_an_error_does_not_hang_peers() -> None:
    seen = []

    def program() -> None:
        model = make_net()
        optimizer = sgd(model.parameters())
        try:
            with paceline.attach(model, optimizer, "averaging", period=2) as run:
                steps(model, optimizer, 2)
                if rank() == 1:
                    raise ValueError("mine")
                steps(model, optimizer, 2)
                del run
        except (ValueError, paceline.PeerLostError) as error:
            seen.append(type(error).__name__)
            raise

    with pytest.raises(ValueError, match="mine"):
        simulate(program, 3)
    assert sorted(seen) == ["PeerLostError", "PeerLostError", "ValueError"]


def test_after_close_the_optimizer_is_the_users_again() -> None:
    def program() -> tuple[Any, Any]:
        with attached(make_net(), "averaging", period=2) as (run, model, optimizer):
            steps(model, optimizer, 2)
        sent = run.bytes_sent
        steps(model, optimizer, 2)
        return run.bytes_sent - sent, state_of(model)

    (zero, one), (_, other) = simulate(program, 2)
    assert zero == 0 and not same_bits(one, other)


# -- the global model --------------------------------------------------------------------------------------------------
def test_global_model_is_inside_and_own_model_outside() -> None:
    def program() -> bool:
        with attached(make_net(norm=True), "bmuf", period=2) as (run, model, optimizer):
            steps(model, optimizer, 5)
            own, exported = state_of(model), state_of(run.model_for_export())
            assert not same_bits(own, exported)
            with run.global_model() as inside:
                assert inside is model and same_bits(state_of(model), exported)
            assert same_bits(state_of(model), own)
            assert same_bits(run.global_state(), exported)
        return same_bits(state_of(model), run.global_state())

    assert simulate(program, 2) == [True, True]


def test_one_worker_speaks_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    def program() -> bool:
        with attached(nn.Linear(2, 1), "averaging", lr=0.1) as (run, *_):
            run.print("of", run.world.size, sep=" ")
            return run.is_main

    assert simulate(program, 3) == [True, False, False]
    assert capsys.readouterr().out.count("of 3\n") == 1


def test_tied_weights_stay_tied() -> None:
    def program() -> Any:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        model[2].weight = model[0].weight
        with attached(model, "bmuf", period=2) as (run, _, optimizer):
            steps(model, optimizer, 5)
            exported, state = run.model_for_export(), run.global_state()
            assert exported[0].weight is exported[2].weight
            assert torch.equal(state["0.weight"], state["2.weight"])
            assert torch.equal(state["0.weight"], exported[0].weight)
        return state_of(model)

    assert agree(simulate(program, 2))


def test_several_models_in_a_dictionary() -> None:
    def program() -> Any:
        parts = {"encoder": nn.Linear(6, 4), "decoder": nn.Linear(4, 3)}
        optimizer = momentum_sgd([p for m in parts.values() for p in m.parameters()])
        with paceline.attach(parts, optimizer, "bmuf", period=2) as run:
            steps(nn.Sequential(*parts.values()), optimizer, 5)
            assert set(run.global_state()) == {"encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"}
            assert set(run.model_for_export()) == {"encoder", "decoder"}
        return run.global_state()

    assert agree(simulate(program, 2))


# -- what people do ----------------------------------------------------------------------------------------------------
def accumulate(rule: str, parts: int) -> list[dict[str, torch.Tensor]]:
    """The same samples in one batch of eight, or in `parts` micro-batches."""

    def program() -> Any:
        model = make_net(dtype=torch.float64)
        optimizer = momentum_sgd(model.parameters())
        x, y = make_data(96, dtype=torch.float64).tensors
        with paceline.attach(model, optimizer, rule) as run:
            for bx, by in run.share(list(zip(x.split(8), y.split(8), strict=True))):
                optimizer.zero_grad()
                for px, py in zip(bx.chunk(parts), by.chunk(parts), strict=True):
                    (nn.functional.cross_entropy(model(px), py) / parts).backward()
                optimizer.step()
            assert run.minibatches == 6
        return state_of(model)

    return simulate(program, 2)


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=2)"])
def test_gradient_accumulation(rule: str) -> None:
    whole, parts = accumulate(rule, 1), accumulate(rule, 4)
    assert agree(parts)
    assert max(float((whole[0][k] - parts[0][k]).abs().max()) for k in whole[0]) < 1e-12


def test_parameter_groups_with_rates_and_betas_of_their_own() -> None:
    """Under a constant gradient every group's bias-corrected moments are the gradient, at every block."""

    def program() -> list[float]:
        model = nn.ModuleList([nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)])
        optimizer = torch.optim.Adam(
            [
                {"params": model[0].parameters(), "betas": (0.5, 0.9)},
                {"params": model[1].parameters(), "betas": (0.95, 0.999), "lr": 0.1},
            ],
            lr=0.01,
        )
        with paceline.attach(model, optimizer, "bmuf_adam", period=4, gain="paper"):
            found = []
            for step in range(16):
                for part, g in zip(model, (2.0, -3.0), strict=True):
                    part.weight.grad = torch.full_like(part.weight, g)
                optimizer.step()
                if step % 4 == 3:
                    for group in optimizer.param_groups:
                        state = optimizer.state[group["params"][0]]
                        (b1, b2), k = group["betas"], float(state["step"])
                        found.append(float(state["exp_avg"][0, 0]) / (1 - b1**k))
                        found.append(float(state["exp_avg_sq"][0, 0]) / (1 - b2**k))
        return found

    assert simulate(program, 4)[0] == pytest.approx([2.0, 4.0, -3.0, 9.0] * 4, rel=1e-4)


@pytest.mark.parametrize(
    ("workers", "rule", "given", "then"),
    [
        (2, "bmuf_adam", 0.9, 0.5),
        (2, "auto(probe=0)", 0.9, 0.5),
        (2, "bmuf_adam(beta1=0.2)", 0.9, 0.2),
        (2, "bmuf_adam(beta1=None)", 0.9, 0.9),
        (2, "bmuf_adam", 0.3, 0.3),
        (2, "bmuf", 0.9, 0.9),
        (1, "bmuf_adam", 0.9, 0.9),
    ],
)
def test_block_momentum_lowers_adams_own(workers: int, rule: str, given: float, then: float) -> None:
    """Only where there are several workers, and in every group."""

    def program() -> list[tuple[float, float]]:
        model = make_net()
        groups = [{"params": list(part.parameters())} for part in (model[0], model[2])]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(given, 0.99))
        paceline.attach(model, optimizer, rule).close()
        return [group["betas"] for group in optimizer.param_groups]

    assert simulate(program, workers) == [[(then, 0.99)] * 2] * workers


def test_a_beta_set_later_stays_when_the_rule_changes_and_when_others_leave() -> None:
    def program() -> list[tuple[float, float]]:
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.999))
        with paceline.attach(model, optimizer, "bmuf_adam", period=2) as run:
            found = [optimizer.param_groups[0]["betas"]]
            for settings in ({"betas": (0.8, 0.99)}, {"gain": 1.5}):
                if rank() == 0:
                    run.tune(**settings)
                steps(model, optimizer, 4)  # two blocks
                found.append(optimizer.param_groups[0]["betas"])
            run._engine.blocks.renumber(2)
            found.append(optimizer.param_groups[0]["betas"])
        return found

    assert simulate(program, 2) == [[(0.5, 0.999), *[(0.8, 0.99)] * 3]] * 2


@pytest.mark.parametrize("schedule", ["onecycle", "cyclic"])
@pytest.mark.parametrize(
    ("rule", "most"), [("bmuf_adam", 0.5), ("auto(probe=0)", 0.5), ("bmuf_adam(beta1=None)", 0.95)]
)
def test_a_schedule_that_cycles_beta1_leaves_it_lowered(schedule: str, rule: str, most: float) -> None:
    """OneCycleLR and CyclicLR write it at each step, before or after attach."""

    def program() -> list[float]:
        with attached(make_net(), rule, torch.optim.Adam, lr=0.01) as (_, model, optimizer):
            scheduler: Any = None
            if schedule == "onecycle":
                scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=8)
            else:
                scheduler = torch.optim.lr_scheduler.CyclicLR(
                    optimizer, 0.001, 0.01, step_size_up=4, base_momentum=0.85, max_momentum=0.95
                )
            made: list[float] = []
            optimizer.register_step_post_hook(lambda one, *_: made.append(one.param_groups[0]["betas"][0]))
            for _ in range(6):
                descend(model, optimizer, torch.ones(4, 6))
                scheduler.step()
        scheduler.step()
        optimizer.step()
        assert made.pop() > 0.5  # the run is over
        return made

    for made in simulate(program, 2):
        assert max(made) == pytest.approx(most) and len(made) == 6


FORMS: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "for": {"foreach": False}, "fused": {"fused": True}}


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_adam_read_the_real_valued_counter(kind: Any, form: str) -> None:
    def program() -> tuple[list[float], dict[str, torch.Tensor]]:
        model = make_net()
        optimizer = kind(model.parameters(), lr=0.01, betas=(0.5, 0.9), **FORMS[form])
        with paceline.attach(model, optimizer, "bmuf_adam", period=3, gain="paper"):
            counters = []
            torch.manual_seed(rank())
            for _ in range(6):
                descend(model, optimizer, torch.randn(4, 6))
                counters.append(float(optimizer.state[model[0].weight]["step"]))
        return counters, state_of(model)

    (counters, state), (_, other) = simulate(program, 2)
    # eta 1/2: rho = 3, 4.5; k = 3 + 1.5, then 7.5 + 2.25
    assert counters == [1, 2, 4.5, 5.5, 6.5, 9.75]
    assert same_bits(state, other)
    plain = _plain_form(program, kind)
    assert max(float((state[k] - plain[k]).abs().max()) for k in state) < 1e-5


def _plain_form(program: Any, kind: Any) -> dict[str, torch.Tensor]:
    """The same with the form that loops over parameters; kept apart so that each form is compared with it."""

    def reference() -> dict[str, torch.Tensor]:
        model = make_net()
        optimizer = kind(model.parameters(), lr=0.01, betas=(0.5, 0.9), foreach=False)
        with paceline.attach(model, optimizer, "bmuf_adam", period=3, gain="paper"):
            steps(model, optimizer, 6)
        return state_of(model)

    return simulate(reference, 2)[0]


@pytest.mark.parametrize("form", ["list", "two attaches"])
@pytest.mark.parametrize("rule", ["sync", "bmuf(period=2)", "averaging(period=2, warmup=2)", "bmuf_adam(period=2)"])
def test_two_optimizers_over_disjoint_parameters(form: str, rule: str) -> None:
    def program() -> Any:
        model = make_net(norm=True)
        halves = [adam(model[0].parameters()), adam([*model[1].parameters(), *model[3].parameters()])]
        if form == "list":
            runs = [paceline.attach(model, halves, rule)]
        else:
            runs = [paceline.attach(model, half, rule) for half in halves]
        torch.manual_seed(rank())
        for _ in range(5):
            for half in halves:
                half.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            for half in halves:
                half.step()
        for run in runs:
            run.close()
        assert runs[0].minibatches == 5
        return state_of(model)

    assert agree(simulate(program, 2))


@pytest.mark.parametrize("rule", ["averaging", "bmuf_adam"])
def test_a_parameter_used_later_under_amsgrad_or_averaged_moments(rule: str) -> None:
    def program() -> Any:
        model = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
        amsgrad = {"amsgrad": True} if rule == "averaging" else {}
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **amsgrad)
        with paceline.attach(model, optimizer, rule, period=2, local_state="average"):
            torch.manual_seed(rank())
            for step in range(8):
                follow(optimizer, model[int(step >= 4)](torch.randn(4, 6)).square().mean())
        return state_of(model)

    assert agree(simulate(program, 2))


def test_a_compiled_model() -> None:
    def program() -> Any:
        inner = make_net()
        model: Any = torch.compile(inner, backend="eager")
        with attached(model, "bmuf", momentum_sgd, period=2) as (run, _, optimizer):
            steps(model, optimizer, 5)
            assert set(run.global_state()) == set(inner.state_dict())
            assert type(run.model_for_export()) is nn.Sequential
        return state_of(inner)

    def plain() -> Any:
        with attached(make_net(), "bmuf", momentum_sgd, period=2) as (_, model, optimizer):
            steps(model, optimizer, 5)
        return state_of(model)

    compiled = simulate(program, 2)
    assert agree(compiled)
    assert same_bits(compiled[0], simulate(plain, 2)[0])


def test_channels_last_and_a_moved_model() -> None:
    def program() -> Any:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
        with attached(model, "bmuf", momentum_sgd, period=2) as (_, _, optimizer):
            torch.manual_seed(rank())
            for step in range(6):
                descend(model, optimizer, torch.randn(2, 3, 5, 5))
                if step == 3:
                    for p in model.parameters():
                        p.data = p.data.clone()
        return state_of(model)

    assert agree(simulate(program, 2))


def test_moments_from_before_attach_are_a_common_start() -> None:
    def program() -> Any:
        model = make_net()
        optimizer = adam(model.parameters())
        steps(model, optimizer, 2, seed=rank())  # alone, and different on each worker
        with paceline.attach(model, optimizer, "bmuf_adam", period=2):
            first = optimizer.state[model[0].weight]["exp_avg"].clone()
            steps(model, optimizer, 4)
        return {"m": first, **state_of(model)}

    assert agree(simulate(program, 2))


def test_outer_state_on_the_host_changes_nothing() -> None:
    one, other = (
        train("bmuf_adam(period=2)", 2, optimizer=adam, settings={"outer_state": where})[0]
        for where in ("device", "host")
    )
    assert same_bits(one.model, other.model)


# -- memory ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rule", "copies"),
    [
        ("averaging", 1),
        ("bmuf", 2),
        ("bmuf(nesterov=False)", 2),
        ("diloco", 2),
        ("bmuf_adam", 4),
        ("bmuf_adam(local_state='average')", 2),
        ("bmuf_adam(local_state='keep')", 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outer_state_is_small(rule: str, copies: int, dtype: torch.dtype) -> None:
    def program() -> int:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10)).to(dtype)
        with attached(model, rule, adam, period=1) as (run, _, optimizer):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            assert run._state.blocks is not None
            return sum(t.numel() * t.element_size() for t in run._state.blocks.updates[0].state.tensors().values())

    parameters = 64 * 64 + 64 + 640 + 10
    assert simulate(program, 2) == [copies * 4 * parameters] * 2


# -- what a run says ---------------------------------------------------------------------------------------------------
def test_the_event_log(tmp_path: Path) -> None:
    def log(place: Place) -> None:
        place.run.log(loss=1.5 if place.step else float("nan"))

    train("bmuf(period=2)", 2, settings={"log": tmp_path}, after_step=log)
    for r in range(2):
        events = [json.loads(line) for line in (tmp_path / f"rank-00{r}.jsonl").read_text().splitlines()]
        kinds = [e["kind"] for e in events]
        assert kinds[0] == "attach" and kinds[-1] == "close"
        assert {e["rank"] for e in events} == {r}
        assert events[0]["size"] == 2 and events[0]["rule"] == "bmuf(period=2)" and events[0]["parameters"] == 83
        assert [e["value"] for e in events if e["kind"] == "value"][:2] == ["nan", 1.5]
        exchanges = [e for e in events if e["kind"] == "exchange"]
        assert sum(e["minibatches"] for e in exchanges) == 12
        assert sum(e["samples"] or 0 for e in exchanges) == 48
        assert [e["epoch"] for e in events if e["kind"] == "epoch"] == [0, 1]
        assert [e["at_s"] for e in events] == sorted(e["at_s"] for e in events)


def test_settings_of_the_launcher_yield_to_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RULE", "diloco(period=9)")
    monkeypatch.setenv("PACELINE_LOG", str(tmp_path / "theirs"))
    with attached(make_net()) as (run, model, _):
        assert run.rule.text() == "diloco(period=9)"
    with attached(model, "averaging", log=tmp_path / "ours") as (run, *_):
        assert run.rule.name == "averaging"
    assert [p.name for p in (tmp_path / "theirs").glob("*.jsonl")] == ["rank-000.jsonl"]
    assert [p.name for p in (tmp_path / "ours").glob("*.jsonl")] == ["rank-000.jsonl"]


def test_nothing_is_logged_without_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="paceline"):
        train("bmuf(period=2)", 2)
    assert not caplog.records


def test_attributes_that_a_part_holds_are_read_only_and_documented() -> None:
    for name in ("world", "rule", "bytes_sent", "minibatches", "samples", "blocks", "epoch"):
        attribute = vars(paceline.Run)[name]
        assert isinstance(attribute, property) and attribute.fset is None
        assert attribute.__doc__ != type(attribute).__doc__, name
