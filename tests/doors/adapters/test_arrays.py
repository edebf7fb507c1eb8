# SPDX-License-Identifier: Apache-2.0
"""Arrays that are written to where they lie, beside the same numbers trained through torch."""

from __future__ import annotations

import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.doors.adapters.array_run import UNCHANGED_STEPS
from tests.helpers import same_bits, simulate

RATE = 0.125  # a power of two: a product with it is exact, however it is computed
STEPS = 13
Arrays = dict[str, Any]


def rank() -> int:
    found = paceline.communication.virtual.transport.current()
    return 0 if found is None else found.world.rank


def start() -> Arrays:
    return {"w": np.ones((2, 3)), "b": np.zeros(3)}


def targets(step: int) -> Arrays:
    """Where this worker is pulled to in a step; the gradient of half the square of the distance is elementwise."""
    drawn = np.random.RandomState(100 * rank() + step)
    return {"w": drawn.randn(2, 3), "b": drawn.randn(3)}


def in_numpy(rule: str, momentum: float = 0.0, **settings: Any) -> Callable[[], Arrays]:
    def program() -> Arrays:
        held, speed = start(), {name: np.zeros_like(value) for name, value in start().items()}
        shown = {"momentum": speed, "decay": momentum} if momentum else {}
        with paceline.attach_arrays(held, rule, **shown, **settings) as run:
            for step in range(STEPS):
                gradients = run.mean({name: held[name] - to for name, to in targets(step).items()})
                for name, value in held.items():
                    speed[name] *= momentum
                    speed[name] += gradients[name]
                    value -= RATE * speed[name]
                run.step()
        return {name: torch.from_numpy(value.copy()) for name, value in held.items()}

    return program


def in_torch(rule: str, momentum: float = 0.0, **settings: Any) -> Callable[[], Arrays]:
    def program() -> Arrays:
        model = nn.ParameterDict({name: nn.Parameter(torch.from_numpy(value)) for name, value in start().items()})
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
        with paceline.attach(model, optimizer, rule, **settings):
            for step in range(STEPS):
                optimizer.zero_grad()
                parts = [(model[name] - torch.from_numpy(to)).square().sum() for name, to in targets(step).items()]
                (torch.stack(parts).sum() / 2).backward()
                optimizer.step()
        return {name: value.detach().clone() for name, value in model.items()}

    return program


RULES = [
    "bmuf(period=4)",
    "bmuf(period=4, overlap=2)",
    "bmuf(period=4, warmup=3)",
    "averaging(period=4, codec='bf16')",
    "sync(reproducible=True)",
    "one_bit",
    "asgd(period=3)",
    "easgd(period=3)",
]


@pytest.mark.parametrize("rule", RULES)
def test_numpy_ends_with_the_bits_of_torch(rule: str) -> None:
    mine, torchs = simulate(in_numpy(rule), 3), simulate(in_torch(rule), 3)
    assert all(same_bits(one, mine[0]) for one in mine)
    assert same_bits(mine[0], torchs[0])


@pytest.mark.parametrize("local_state", ["reset", "average"])
def test_momentum_that_is_shown_is_treated_as_torchs(local_state: str) -> None:
    rule = f"bmuf(period=4, local_state='{local_state}')"
    mine, torchs = simulate(in_numpy(rule, 0.5), 3), simulate(in_torch(rule, 0.5), 3)
    kept = simulate(in_numpy("bmuf(period=4, local_state='keep')", 0.5), 3)
    assert same_bits(mine[0], torchs[0]) and not same_bits(mine[0], kept[0])


def test_one_worker_is_the_plain_program() -> None:
    held = start()
    for step in range(STEPS):
        for name, to in targets(step).items():
            held[name] -= RATE * (held[name] - to)
    assert same_bits(in_numpy("bmuf")(), {name: torch.from_numpy(value) for name, value in held.items()})


def test_every_kind_of_array_is_seen_where_it_lies() -> None:
    numbers = array.array("f", [1.0, 2.0])
    held = {
        "numpy": np.ones(3, np.float32),
        "bf16": np.ones(3, ml_dtypes.bfloat16),
        "torch": torch.ones(3),
        "buffer": numbers,
        "fortran": np.ones((2, 3), order="F"),
    }
    run = paceline.attach_arrays(held)
    memory = {name: p.data_ptr() for name, p in run._parameters.items()}
    run.close()
    assert memory["numpy"] == held["numpy"].ctypes.data and memory["bf16"] == held["bf16"].ctypes.data
    assert memory["torch"] == held["torch"].data_ptr()
    assert memory["buffer"] == numbers.buffer_info()[0] and memory["fortran"] == held["fortran"].ctypes.data


def test_new_arrays_handed_over_are_exchanged_where_they_lie() -> None:
    def program() -> Any:
        w, b = start().values()
        with paceline.attach_arrays([w, b], "averaging(period=2)") as run:
            for step in range(4):
                w, b = (now - RATE * (now - to) for now, to in zip((w, b), targets(step).values(), strict=True))
                run.step([w, b])
                assert run._parameters["0"].data_ptr() == w.ctypes.data
        return {"w": torch.from_numpy(w), "b": torch.from_numpy(b)}

    ends = simulate(program, 3)
    assert all(same_bits(end, ends[0]) for end in ends)


def test_resume_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def program(stop: int, resume: bool) -> Arrays:
        held, speed = start(), {name: np.zeros_like(value) for name, value in start().items()}
        run = paceline.attach_arrays(held, "averaging(period=4, local_state='keep')", momentum=speed, decay=0.5)
        if resume:
            run.resume(tmp_path / "saved")
        for step in range(run.minibatches, stop):
            for name, to in targets(step).items():
                speed[name] *= 0.5
                speed[name] += held[name] - to
                held[name] -= RATE * speed[name]
            run.step()
        if stop == 6:
            run.save(tmp_path / "saved")
        run.close()
        return {name: torch.from_numpy(value.copy()) for name, value in held.items()}

    whole = simulate(partial(program, STEPS, False), 2)
    simulate(partial(program, 6, False), 2)
    assert same_bits(simulate(partial(program, STEPS, True), 2)[0], whole[0])


class OfDevice:
    """An array as CuPy has it, with DLPack: of 1.0, or of before."""

    def __init__(self, held: Any, old: bool = False) -> None:
        self.held, self.old, self.shape = held, old, held.shape

    def __dlpack__(self, **asked: Any) -> Any:
        if self.old and "max_version" in asked:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.held.__dlpack__() if self.old else self.held.__dlpack__(**asked)

    def __dlpack_device__(self) -> Any:
        return self.held.__dlpack_device__()


class Described:
    """An array that only describes its memory, by the interface of NumPy or CUDA."""

    def __init__(self, held: Any, by: str = "__array_interface__") -> None:
        self.held, self.shape = held, held.shape
        setattr(self, by, held.__array_interface__)


class Blob:
    """A parameter with its array inside."""

    def __init__(self, **inside: Any) -> None:
        vars(self).update(inside)


@pytest.mark.parametrize("kind", [OfDevice, lambda held: OfDevice(held, old=True), Described])
def test_arrays_of_other_libraries_are_exchanged_where_they_lie(kind: Any) -> None:
    def program() -> list[float]:
        numbers = np.zeros(2)
        with paceline.attach_arrays([kind(numbers)], "averaging(period=2)") as run:
            for _ in range(2):
                numbers += 1 + rank()
                run.step()
            assert numbers.tolist() == [3.0, 3.0]
            for _ in range(3):
                numbers += rank()
                run.step()
        return numbers.tolist()

    assert simulate(program, 2) == [[4.5, 4.5]] * 2


def readonly() -> Any:
    held = np.ones(3)
    held.flags.writeable = False
    return held


WRONG = [
    (np.ones(3, np.int64), "holds int64"),
    (readonly(), "read-only"),
    (np.ones(3, np.longdouble), "cannot be shared with torch"),
    (np.ones(3, ml_dtypes.float8_e4m3fn), "cannot be shared with torch"),
    (torch.ones(3).to(torch.float8_e4m3fn), "cannot be averaged"),
    (np.ones((4, 4))[:, ::2], "gaps"),
    (np.ones(3)[::-1], "cannot be shared with torch"),
    (memoryview(b"1234"), "read-only"),
    ([1.0, 2.0], "neither DLPack nor the buffer protocol"),
    (OfDevice(readonly()), "read-only"),
    (Described(readonly()), "read-only"),
    (Described(readonly(), "__cuda_array_interface__"), "read-only"),
    (OfDevice(np.ones((4, 4))[:, ::2]), "gaps"),
    (OfDevice(np.ones(3, np.int32)), "holds int32"),
    (OfDevice(np.array(["a"])), "cannot be shared with torch"),
    (Blob(data=np.ones(3)), r"attach the ndarray inside of it, \.data"),
    (Blob(array=np.ones(3), data=None), r"attach the ndarray inside of it, \.array"),
    (Blob(data=None), "attach arrays, e.g. of NumPy"),
]


@pytest.mark.parametrize(("wrong", "says"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_an_array_is_refused_and_nothing_changes(wrong: Any, says: str) -> None:
    good = np.ones(3)
    with pytest.raises(paceline.UnsupportedError, match=says):
        paceline.attach_arrays({"good": good, "wrong": wrong})
    assert (good == 1).all()


def test_arrays_that_overlap_are_refused() -> None:
    whole = np.ones(6)
    with pytest.raises(paceline.UnsupportedError, match="lie in the same memory"):
        paceline.attach_arrays([whole[:4], whole[3:]])


@pytest.mark.parametrize("rule", ["one_bit_adam", "asgd", "dc_asgd", "bmuf_adam", "bmuf(local_state='reset')"])
def test_rules_that_need_the_optimizer_are_refused_by_name(rule: str) -> None:
    with pytest.raises(paceline.UnsupportedError, match=rule.partition("(")[0]):
        paceline.attach_arrays(start(), rule)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("bmuf(period=4)", [2, 1, 0, 3, 2, 1]),
        ("averaging(period=4, overlap=2)", [2, 1, 0, 1, 0, 1]),
        ("sync", [0] * 6),
        ("asgd(period=4)", [0] * 6),
    ],
)
def test_steps_before_the_run_has_anything_to_do_are_foretold(rule: str, expected: list[int]) -> None:
    def program() -> list[int]:
        weights, found = np.ones(3), []
        with paceline.attach_arrays([weights], rule) as run:
            assert run.idle_steps == 0, "do the arrays change at all?"
            for _ in range(6):
                run.mean([np.ones(3)])
                weights[:] += 1
                run.step()
                found.append(run.idle_steps)
        return found

    assert simulate(program, 2) == [expected] * 2


def test_another_shape_is_refused_and_the_run_goes_on() -> None:
    def program() -> Any:
        held = start()
        with paceline.attach_arrays(held, "averaging(period=2)") as run:
            for step in range(4):
                for name, to in targets(step).items():
                    held[name] -= RATE * (held[name] - to)
                with pytest.raises(paceline.UnsupportedError, match=r"w has shape \(3, 2\).*\(2, 3\)"):
                    run.step({"w": np.ones((3, 2)), "b": held["b"]})
                with pytest.raises(paceline.UnsupportedError, match="odd are missing on one side"):
                    run.step({**held, "odd": np.ones(1)})
                run.step()
        return {name: torch.from_numpy(value) for name, value in held.items()}

    assert same_bits(simulate(program, 2)[0], simulate(lambda: program(), 2)[1])


def test_workers_with_different_shapes_all_hear_of_it() -> None:
    heard = []

    def program() -> None:
        try:
            paceline.attach_arrays([np.ones(3 + rank())], "averaging")
        except paceline.MismatchError as error:
            heard.append(str(error))
            raise

    with pytest.raises(paceline.MismatchError):
        simulate(program, 2)
    assert len(heard) == 2 and all("(3,)" in said and "(4,)" in said for said in heard)


def test_arrays_that_never_change_are_taken_for_forgotten() -> None:
    def program() -> None:
        w = np.ones(3)
        run = paceline.attach_arrays([w], "averaging(period=100)")
        for _ in range(UNCHANGED_STEPS):
            w = w - RATE * w  # a new array, of which the run knows nothing
            run.step()

    with pytest.raises(paceline.UnsupportedError, match="have not changed"):
        simulate(program, 2)
