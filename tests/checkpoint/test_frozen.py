# SPDX-License-Identifier: Apache-2.0
"""What training never changes is written once, travels at most once, and is copied for no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.core import bits
from paceline.core.bits import checksum
from paceline.errors import CheckpointError
from paceline.flow.joining import held_by, pack_state, receive_state, tell_held
from paceline.update.engine import agreement
from tests.helpers import State, adam, same_bits, simulate, state_of

WIDTH, CLASSES = 256, 13
FROZEN = 4 * WIDTH * WIDTH
"""Bytes of the frozen base, 95 % of the model's."""
SMALL = FROZEN // 2
"""More than all that is trained, with its Adam, its outer state and the random generators."""


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LEAST_FROZEN_BYTES", SMALL)
    monkeypatch.setattr(bits, "PIECE_BYTES_CPU", SMALL)


class Tuned(nn.Module):
    """A frozen base, and the little that is trained on top of it."""

    def __init__(self, base: int = 0) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        nn.init.normal_(self.base.weight, generator=torch.Generator().manual_seed(base))
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.normal_(self.head.weight, std=0.01, generator=torch.Generator().manual_seed(1))
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.base(x) / WIDTH**0.5))
        return scores


Change = Callable[[Any, int, int], object]
"""(model, rank, step): what the program does to its own tensors after a step."""


def train(
    rule: str,
    *,
    steps: int = 6,
    base: int = 0,
    make: Callable[[int], nn.Module] = Tuned,
    change: Change = lambda model, rank, step: None,
    stop_at: int | None = None,
    save: Path | None = None,
    resume: Path | None = None,
    **settings: Any,
) -> State:
    """Train in a worker; what its model ends with."""
    model = make(base)
    optimizer = adam([one for one in model.parameters() if one.requires_grad])
    with paceline.attach(model, optimizer, rule, data="own", **settings) as run:
        if resume is not None or "checkpoint" in settings:
            run.resume(resume)
        for step in range(run.minibatches, steps):
            run.checkpoint()
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + run.world.rank)
            model(torch.randn(2, WIDTH, generator=generator)).square().mean().backward()
            optimizer.step()
            change(model, run.world.rank, step)
            if step + 1 == stop_at:
                run.abandon()
                return state_of(model)
        if save is not None:
            run.save(save)
    return state_of(model)


def on_two(rule: str, **choices: Any) -> list[State]:
    return simulate(lambda: train(rule, **choices), 2)


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file below a folder."""
    return {str(one.relative_to(folder)): one.stat().st_size for one in folder.rglob("*.*") if one.is_file()}


def kept(folder: Path) -> dict[str, Any]:
    return {"checkpoint": folder, "every_blocks": 1, "keep": 2}


RULES = ["sync", "bmuf(period=2)", "bmuf_adam(period=2, overlap=1)"]


@pytest.mark.parametrize("rule", RULES)
def test_the_steps_of_a_run_hold_a_frozen_base_once(rule: str, tmp_path: Path) -> None:
    whole = on_two(rule)
    on_two(rule, stop_at=5, **kept(tmp_path))
    found = sizes(tmp_path)
    held = {name: size for name, size in found.items() if name.startswith("frozen")}
    assert len(held) == 1 and FROZEN <= sum(held.values()) < FROZEN + 1000
    assert any(name.endswith("global.safetensors") for name in found)
    assert {name: size for name, size in found.items() if name not in held and size > SMALL} == {}
    assert all(same_bits(one, other) for one, other in zip(on_two(rule, **kept(tmp_path)), whole, strict=True))


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=2)", "asgd"])
def test_a_checkpoint_by_itself_holds_it_once_and_its_global_model_whole(rule: str, tmp_path: Path) -> None:
    ended = on_two(rule, save=tmp_path / "c")
    found = sizes(tmp_path / "c")
    assert [name for name, size in found.items() if size > 2 * SMALL] == ["global.safetensors"]
    model = Tuned(5)
    model.load_state_dict(load_file(tmp_path / "c" / "global.safetensors"))
    assert torch.equal(model.base.weight, ended[0]["base.weight"])
    for workers in (2, 3):
        again = simulate(lambda: train(rule, base=7, resume=tmp_path / "c"), workers)
        assert all(torch.equal(one["base.weight"], ended[0]["base.weight"]) for one in again)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("values", ["there", "missing", "damaged"])
@pytest.mark.parametrize("base", [0, 7])
def test_a_resume_takes_the_base_of_the_program_or_the_file(
    base: int, values: str, workers: int, tmp_path: Path
) -> None:
    rule = "bmuf(period=2)"
    ended = on_two(rule, stop_at=5, **kept(tmp_path))
    (file,) = (tmp_path / "frozen").iterdir()
    if values == "missing":
        file.unlink()
    elif values == "damaged":
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)

    def body() -> State:
        return train(rule, base=base, **kept(tmp_path))

    if base and values != "there":
        with pytest.raises(CheckpointError, match=r"base.weight is frozen, .* load the same base as then, or put"):
            simulate(body, workers)
    else:
        for one in simulate(body, workers):
            assert torch.equal(one["base.weight"], ended[0]["base.weight"])


# -- what looks frozen and is not --------------------------------------------------------------------------------------
class Teacher(Tuned):
    """With a copy of the base that the program changes: an average, a mask, a queue."""

    def __init__(self, base: int = 0) -> None:
        super().__init__(base)
        self.teacher = nn.Parameter(self.base.weight.detach().clone(), requires_grad=False)
        self.register_buffer("mask", torch.zeros(2 * WIDTH, WIDTH, dtype=torch.bool))


class Tied(Tuned):
    """With second names of what is frozen, and of what is trained."""

    def __init__(self, base: int = 0) -> None:
        super().__init__(base)
        self.again, self.second = self.base, nn.Linear(WIDTH, CLASSES, bias=False)
        self.second.weight = self.head.weight


def average_late(model: Any, rank: int, step: int) -> None:
    if step >= 3:
        model.teacher.data = model.teacher.data * 0.5


def nothing(model: Any, rank: int, step: int) -> None: ...


CHANGES: dict[str, tuple[type[Tuned], Change, int]] = {
    # the base: the mask is a buffer, which workers exchange
    "an average, by .data": (Teacher, lambda model, rank, step: model.teacher.data.mul_(0.9), 1),
    "an average on one worker": (Teacher, lambda model, rank, step: rank or model.teacher.data.mul_(0.9), 2),
    "a new tensor, late": (Teacher, average_late, 2),
    "a mask": (Teacher, lambda model, rank, step: model.mask[step].fill_(True), 2),
    "nothing": (Teacher, nothing, 2),
    "tied": (Tied, nothing, 1),
}
"""What the program changes, and how many tensors are written once."""


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=2)"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_program_changes_is_saved_as_it_is(name: str, rule: str, tmp_path: Path) -> None:
    make, change, once = CHANGES[name]
    choices: dict[str, Any] = {"make": make, "change": change}
    whole = on_two(rule, **choices)
    on_two(rule, stop_at=5, **choices, **kept(tmp_path))
    held = list((tmp_path / "frozen").iterdir())
    again = on_two(rule, base=7, **choices, **kept(tmp_path))
    assert all(same_bits(one, other) for one, other in zip(again, whole, strict=True))
    assert len(held) == once


# -- joining workers, and copies ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("bases", "sent"), [((0, 0, 0), False), ((0, 0, 7), True)])
def test_a_state_for_joining_workers_has_the_base_once_if_one_of_them_lacks_it(
    bases: tuple[int, int, int], sent: bool
) -> None:
    def body() -> int:
        model = Tuned()
        run = paceline.attach(model, adam(model.head.parameters()), "bmuf(period=2)")
        transport, state = run._transport, run._state
        rank = run.world.rank
        nn.init.normal_(model.base.weight, generator=torch.Generator().manual_seed(bases[rank]))
        if rank:
            told = tell_held(transport, 0, state.frozen_keys())
            assert ("base.weight" in receive_state(transport, 0, 2 * FROZEN).model()) == sent
            nbytes = 0 if told is None else told.wait() or 0
        else:
            parts = pack_state(*state.given(held_by(transport, [1, 2], state.frozen_keys())))
            nbytes = sum(part.nbytes for part in parts)
            for pending in [transport.send(part, to) for to in (1, 2) for part in parts]:
                pending.wait()
        run.abandon()
        return nbytes

    nbytes = simulate(body, 3)[0]
    assert (FROZEN if sent else 0) < nbytes < (FROZEN if sent else 0) + SMALL


class Copies(TorchDispatchMode):
    """Counts the bytes of new tensors of a frozen base's size."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {
            one.untyped_storage().data_ptr() for one in (*args, *(kwargs or {}).values()) if isinstance(one, Tensor)
        }
        if isinstance(out, Tensor) and out.numel() * out.element_size() >= FROZEN:
            self.nbytes += FROZEN if out.untyped_storage().data_ptr() not in known else 0
        return out


@pytest.mark.parametrize(("what", "copies"), [("save", 0), ("step", 0), ("global_model", 0), ("global_state", 1)])
def test_checkpoints_and_evaluation_copy_no_frozen_base(what: str, copies: int, tmp_path: Path) -> None:
    model = Tuned()
    with paceline.attach(model, adam(model.head.parameters()), "bmuf(period=2)", **kept(tmp_path / "steps")) as run:
        with Copies() as seen:
            if what == "save":
                run.save(tmp_path / "c")
            elif what == "step":
                run._parts.checkpointer.now()  # type: ignore[union-attr]
            elif what == "global_model":
                with run.global_model():
                    pass
            else:
                run.global_state()
    assert seen.nbytes == copies * FROZEN


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
def test_a_checksum_tells_constants_apart(dtype: torch.dtype) -> None:
    sums = [checksum(torch.full((1 << 18,), value).to(dtype)) for value in (0.0, 1.0, 2.0, 5.0, 6.0, 255.0)]
    assert len(set(map(tuple, sums))) == len(sums)
