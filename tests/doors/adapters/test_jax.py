# SPDX-License-Identifier: Apache-2.0
"""JAX and optax: arrays that never change, beside the plain program and beside torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from tests.doors.adapters.test_arrays import RATE, STEPS, in_torch, rank, start, targets
from tests.helpers import same_bits, simulate

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jnp = jax.numpy

from paceline_plugins.frameworks import jax as adapter  # noqa: E402 (it imports jax)


def params() -> Any:
    return {name: jnp.asarray(value, jnp.float32) for name, value in start().items()}


def to_torch(tree: Any) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.array(leaf)) for name, leaf in tree.items()}


@jax.jit
def gradient(now: Any, to: Any) -> Any:
    return jax.grad(lambda p: sum(((p[name] - to[name]) ** 2).sum() / 2 for name in p))(now)


def step(optimizer: Any) -> Any:
    """The usual jitted step, which takes the old parameters' memory."""

    def made(now: Any, state: Any, to: Any) -> Any:
        updates, state = optimizer.update(gradient(now, to), state, now)
        return optax.apply_updates(now, updates), state

    return jax.jit(made, donate_argnums=(0, 1))


SGD, ADAM = optax.sgd(RATE), optax.adam(0.01)
STEP, ADAM_STEP = step(SGD), step(ADAM)


def program(rule: str, seen: list[Any] | None = None) -> Callable[[], dict[str, torch.Tensor]]:
    def made() -> dict[str, torch.Tensor]:
        now, state = params(), SGD.init(params())
        with adapter.attach(now, rule) as run:
            now = run.params
            for number in range(STEPS):
                before, state = STEP(now, state, targets(number))
                copy = np.array(before["w"])
                now = run.sync(before)
                assert (np.array(before["w"]) == copy).all()  # it never changes
                if seen is not None:
                    seen.append(now is before)
        return to_torch(run.params)

    return made


def test_one_worker_is_the_plain_program() -> None:
    now, state = params(), SGD.init(params())
    for number in range(STEPS):
        now, state = STEP(now, state, targets(number))
    seen: list[bool] = []
    assert same_bits(program("bmuf(period=4)", seen)(), to_torch(now))
    assert all(seen)  # the very same arrays come back


@pytest.mark.parametrize("rule", ["bmuf(period=4)", "averaging(period=3, overlap=1)", "easgd(period=3)"])
def test_workers_agree_and_follow_torch_to_rounding(rule: str) -> None:
    ends = simulate(program(rule), 3)
    assert all(same_bits(end, ends[0]) for end in ends)
    torchs = simulate(in_torch(rule), 3)[0]  # in float64
    assert all(torch.allclose(ends[0][name].double(), torchs[name], atol=1e-5) for name in torchs)


def test_parameters_are_touched_at_exchanges_only_and_handed_out_without_a_copy() -> None:
    seen: list[bool] = []
    simulate(program("averaging(period=4)", seen), 2)
    assert seen.count(False) == 2 * (STEPS // 4)

    def memory() -> bool:
        run = adapter.attach(params(), "averaging")
        taken = run.params["w"].unsafe_buffer_pointer() == run._memory["w"].data_ptr()
        run.close()
        return taken

    assert simulate(memory, 2) == [True, True]


@pytest.mark.parametrize("rule", ["sync", "one_bit", "bmuf(period=4, warmup=3)"])
def test_gradient_rules_through_update(rule: str) -> None:
    def made() -> dict[str, torch.Tensor]:
        now, state = params(), SGD.init(params())
        with adapter.attach(now, rule, optimizer=SGD) as run:
            now = run.params
            for number in range(STEPS):
                now, state = run.update(gradient(now, targets(number)), state, now)
        return to_torch(run.params)

    ends, torchs = simulate(made, 2), simulate(in_torch(rule), 2)[0]
    assert same_bits(ends[0], ends[1])
    if rule != "one_bit":  # whose signs may tip at the last bit
        assert all(torch.allclose(ends[0][name].double(), torchs[name], atol=1e-5) for name in torchs)


def test_resume_brings_parameters_and_state_back(tmp_path: Path) -> None:
    def made(stop: int, resume: bool) -> dict[str, torch.Tensor]:
        now, state = params(), ADAM.init(params())
        with adapter.attach(now, "bmuf(period=4)", opt_state=state) as run:
            if resume:
                run.resume(tmp_path / "saved")
            now, state = run.params, run.opt_state
            for number in range(run.minibatches, stop):
                now, state = ADAM_STEP(now, state, targets(number))
                now, run.opt_state = run.sync(now), state
            if stop == 6:
                run.save(tmp_path / "saved")
        return to_torch(run.params)

    whole = simulate(partial(made, STEPS, False), 2)
    simulate(partial(made, 6, False), 2)
    assert same_bits(simulate(partial(made, STEPS, True), 2)[0], whole[0])


def test_parameters_of_others_must_be_taken() -> None:
    def made() -> None:
        now = jax.tree.map(lambda leaf: leaf + rank(), params())
        adapter.attach(now, "averaging").sync(now)

    with pytest.raises(paceline.UnsupportedError, match=r"params = run\.params.*rank 1"):
        simulate(made, 2)


WRONG = [
    (lambda now: {**now, "w": jnp.ones((2, 3), jnp.int32)}, "int32"),
    (lambda now: {**now, "w": jnp.ones((3, 2))}, r"shape \(3, 2\)"),
    (lambda now: {**now, "w": np.ones((2, 3), np.float32)}, "no JAX array"),
    (lambda now: {"w": now["w"]}, "tree of parameters"),
]


@pytest.mark.parametrize(("spoilt", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_trees_are_refused_and_the_run_goes_on(spoilt: Any, says: str) -> None:
    with adapter.attach(params(), "averaging") as run:
        with pytest.raises(paceline.UnsupportedError, match=says):
            run.sync(spoilt(run.params))
        run.sync(run.params)
        assert run.minibatches == 1


def test_arrays_of_jax_are_not_taken_for_writable_ones() -> None:
    with pytest.raises(paceline.UnsupportedError, match=r"paceline_plugins\.frameworks\.jax"):
        paceline.attach_arrays([jnp.ones(3)])
