# SPDX-License-Identifier: Apache-2.0
"""Variables of TensorFlow, beside the plain program and beside torch. They need the extra `tensorflow`, which `dev`
does not bring along: `nox --session tensorflow` installs it and runs them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline.doors.adapters.array_run import UNCHANGED_STEPS
from tests.doors.adapters.test_arrays import RATE, STEPS, in_torch, start, targets
from tests.helpers import same_bits, simulate

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed: nox --session tensorflow")
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def two_devices() -> None:
    """Processors of the host as two devices."""
    (processor,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(processor, [tf.config.LogicalDeviceConfiguration()] * 2)


def variables() -> dict[str, Any]:
    return {name: tf.Variable(value) for name, value in start().items()}


def state_of(held: dict[str, Any]) -> State:
    return {name: torch.from_numpy(value.numpy()) for name, value in held.items()}


def compiled(held: dict[str, Any], speed: dict[str, Any] | None = None, momentum: float = 0.0) -> Any:
    """The step towards targets, from a tape, compiled."""

    @tf.function
    def step(to: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum((held[name] - to[name]) ** 2) for name in held]) / 2
        for name, gradient in tape.gradient(loss, held).items():
            if speed is not None:
                speed[name].assign(momentum * speed[name] + gradient)
                gradient = speed[name]
            held[name].assign_sub(RATE * gradient)

    return step


def program(rule: str, momentum: float = 0.0, **settings: Any) -> Callable[[], State]:
    def made() -> State:
        held = variables()
        speed = {name: tf.Variable(tf.zeros_like(value)) for name, value in held.items()} if momentum else None
        step = compiled(held, speed, momentum)
        shown = {"momentum": speed, "decay": momentum} if momentum else {}
        with paceline.attach_arrays(held, rule, **shown, **settings) as run:
            for number in range(STEPS):
                step(targets(number))
                run.step()
        assert step.experimental_get_tracing_count() == 1
        return state_of(held)

    return made


def test_one_worker_is_the_plain_program() -> None:
    held = variables()
    step = compiled(held)
    for number in range(STEPS):
        step(targets(number))
    assert same_bits(program("bmuf(period=4)")(), state_of(held))


BLOCKS = ["bmuf(period=4)", "averaging(period=3, overlap=1)", "easgd(period=3)", "asgd(period=3)"]


@pytest.mark.parametrize("rule", [*BLOCKS, "averaging(period=4, codec='bf16')"])
def test_variables_end_with_the_bits_of_torch(rule: str) -> None:
    ends = simulate(program(rule), 3)
    assert all(same_bits(end, ends[0]) for end in ends)
    assert same_bits(ends[0], simulate(in_torch(rule), 3)[0])


@pytest.mark.parametrize("local_state", ["reset", "average"])
def test_momentum_that_is_shown_is_treated_as_torchs(local_state: str) -> None:
    rule = f"bmuf(period=4, local_state='{local_state}')"
    mine, torchs = simulate(program(rule, 0.5), 3), simulate(in_torch(rule, 0.5), 3)
    kept = simulate(program("bmuf(period=4, local_state='keep')", 0.5), 3)
    assert same_bits(mine[0], torchs[0]) and not same_bits(mine[0], kept[0])


@pytest.mark.parametrize("rule", ["sync(reproducible=True)", "one_bit", "bmuf(period=4, warmup=3)"])
def test_gradient_rules_through_mean(rule: str) -> None:
    def made() -> State:
        held = variables()

        @tf.function
        def gradients(to: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum((held[name] - to[name]) ** 2) for name in held]) / 2
            return tape.gradient(loss, held)

        with paceline.attach_arrays(held, rule) as run:
            for number in range(STEPS):
                for name, gradient in run.mean(gradients(targets(number))).items():
                    held[name].assign_sub(RATE * gradient)
                run.step()
        return state_of(held)

    ends = simulate(made, 3)
    assert all(same_bits(end, ends[0]) for end in ends)
    assert same_bits(ends[0], simulate(in_torch(rule), 3)[0])


def test_averaging_is_the_mean_computed_by_hand_and_counts_what_came_before_the_first_step() -> None:
    def made() -> list[float]:
        held = tf.Variable([4.0, 8.0])
        with paceline.attach_arrays([held], "averaging(period=2)") as run:
            held.assign_add([1.0, 0.0])  # between attach and the first step
            seen = []
            for _ in range(4):
                held.assign_sub([float(run.world.rank), 2.0])
                run.step()
                seen.append([float(value) for value in held])
        return seen

    first, second = simulate(made, 2)
    assert [first[0], second[0]] == [[5.0, 6.0], [4.0, 6.0]]
    assert first[1] == second[1] == [4.0, 4.0]  # the mean of 5 and 3
    assert first[3] == second[3] == [3.0, 0.0]


def test_resume_brings_variables_and_the_optimizer_back(tmp_path: Path) -> None:
    def made(stop: int, resume: bool) -> State:
        held = variables()
        speed = tf.Module()
        speed.held = {name: tf.Variable(tf.zeros_like(value)) for name, value in held.items()}
        step = compiled(held, speed.held, 0.5)
        with paceline.attach_arrays(held, "averaging(period=4, local_state='keep')") as run:
            if resume:
                assert run.resume(tmp_path / "saved", optimizer=speed)
            for number in range(run.minibatches, stop):
                step(targets(number))
                run.step()
            if stop == 6:
                run.save(tmp_path / "saved", optimizer=speed)
        return state_of(held)

    whole = simulate(partial(made, STEPS, False), 2)
    simulate(partial(made, 6, False), 2)
    assert same_bits(simulate(partial(made, STEPS, True), 2)[0], whole[0])


def test_the_global_model_a_merge_and_a_snapshot_are_in_the_variables() -> None:
    def made() -> tuple[list[float], ...]:
        held = tf.Variable([0.0])
        look = lambda: float(held[0])  # noqa: E731
        with paceline.attach_arrays([held], "averaging(period=100)") as run:
            held.assign_add([1.0 + 2.0 * run.world.rank])
            run.step()
            with run.global_model() as whole:
                inside = float(whole["0"][0])
            outside = look()
            run.merge()
            merged, kept = look(), run.snapshot()
            held.assign([9.0])
            run.restore(kept)
            return inside, outside, merged, look()

    assert simulate(made, 2) == [(0.0, 1.0, 2.0, 2.0), (0.0, 3.0, 2.0, 2.0)]


class Wrong:
    """What cannot be attached."""

    @staticmethod
    def in_scope() -> Any:
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            return paceline.attach_arrays([tf.Variable(1.0)])

    @staticmethod
    def in_a_graph() -> Any:
        with tf.Graph().as_default():
            return paceline.attach_arrays([tf.Variable(1.0)])

    @staticmethod
    def mirrored() -> Any:
        with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            spread = tf.Variable(1.0)
        return paceline.attach_arrays([spread])

    @staticmethod
    def two_devices() -> Any:
        with tf.device("CPU:1"):
            there = tf.Variable(1.0)
        return paceline.attach_arrays([tf.Variable(1.0), there])

    @staticmethod
    def twice() -> Any:
        one = tf.Variable(1.0)
        return paceline.attach_arrays([one, one])

    @staticmethod
    def with_numpy() -> Any:
        return paceline.attach_arrays([np.ones(3), tf.Variable(1.0)])

    @staticmethod
    def momentum_of_numpy() -> Any:
        return paceline.attach_arrays([np.ones(3)], momentum=[tf.Variable(tf.ones(3))], decay=0.5)

    @staticmethod
    def tensor() -> Any:
        return paceline.attach_arrays([tf.ones(3)])

    @staticmethod
    def whole_numbers() -> Any:
        return paceline.attach_arrays([tf.Variable([1, 2])])

    @staticmethod
    def text() -> Any:
        return paceline.attach_arrays([tf.Variable(["a"])])

    @staticmethod
    def momentum_of_another_shape() -> Any:
        return paceline.attach_arrays([tf.Variable(1.0)], momentum=[tf.Variable([1.0])], decay=0.5)


WRONG = [
    (Wrong.in_scope, "a tf.distribute strategy is in scope"),
    (Wrong.in_a_graph, "builds a graph here.*sessions, are not supported"),
    (Wrong.mirrored, "MirroredVariable.*start a process for each device"),
    (Wrong.two_devices, "CPU:0 and .*CPU:1; a worker has one device"),
    (Wrong.twice, "0 and 1 are the same variable"),
    (Wrong.with_numpy, "0 is a ndarray and no tf.Variable"),
    (Wrong.momentum_of_numpy, "attach tf.Variables, and nothing else"),
    (Wrong.tensor, "EagerTensor and no tf.Variable"),
    (Wrong.whole_numbers, "holds int32"),
    (Wrong.text, "holds string, and what can be trained is"),
    (Wrong.momentum_of_another_shape, "momentum must be an array for each"),
]


@pytest.mark.parametrize(("attach", "says"), WRONG, ids=[attach.__name__ for attach, _ in WRONG])
def test_what_cannot_be_attached_is_refused(attach: Callable[[], Any], says: str) -> None:
    with pytest.raises(paceline.UnsupportedError, match=says):
        attach()


def test_calls_inside_a_graph_and_wrong_gradients_are_refused_and_the_run_goes_on() -> None:
    def made() -> int:
        held = tf.Variable([1.0])
        with paceline.attach_arrays([held], "sync") as run:
            for call in (run.step, lambda: run.mean([tf.ones(1)]), lambda: paceline.attach_arrays([held])):
                with pytest.raises(Exception, match="builds a graph here"):  # TensorFlow raises its own around it
                    tf.function(call)()
            for wrong, says in (
                ([tf.ones(2)], r"shape \(2,\)"),
                ([tf.ones(1, tf.float64)], "float64"),
                ([tf.ones(1)] * 2, "1 are missing on one side"),
                ([np.ones(1)], "no tensor of TensorFlow"),
            ):
                with pytest.raises(paceline.UnsupportedError, match=says):
                    run.mean(wrong)
            with pytest.raises(paceline.UnsupportedError, match=r"run\.mean\(gradients\)"):
                run.step()
            (gradient,) = run.mean([tf.ones(1)])
            held.assign_sub(gradient)
            run.step()
            minibatches = run.minibatches
        run.step()  # after the end the program goes on alone
        assert run.mean([gradient])[0] is gradient and run.minibatches == minibatches
        return minibatches

    assert simulate(made, 2) == [1, 1]


def test_variables_that_are_replaced_are_noticed_or_handed_over() -> None:
    def forgotten() -> None:
        held = tf.Variable([1.0])
        run = paceline.attach_arrays([held], "averaging(period=100)")
        for _ in range(UNCHANGED_STEPS):
            held = tf.Variable(held * 0.5)
            run.step()

    def handed_over() -> list[float]:
        held = tf.Variable([1.0])
        with paceline.attach_arrays([held], "averaging(period=2)") as run:
            for _ in range(4):
                held = tf.Variable(held + 2.0 * run.world.rank)
                run.step([held])
            with pytest.raises(paceline.UnsupportedError, match=r"shape \(2,\)"):
                run.step([tf.Variable([1.0, 2.0])])
        return held.numpy().tolist()

    with pytest.raises(paceline.UnsupportedError, match="have not changed in 10 steps; train those"):
        simulate(forgotten, 2)
    assert simulate(handed_over, 2) == [[5.0], [5.0]]
