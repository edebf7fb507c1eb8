# SPDX-License-Identifier: Apache-2.0
"""The laws of every rule, as functions: for a rule, or a part of one, of your own.

>>> from paceline.testing import check_rule
>>> check_rule("bmuf(period=3)")

A broken law raises AssertionError with the values seen. The laws hold for rules whose workers exchange together. They
run a small training on virtual workers, which takes a few seconds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import RuleError
from paceline.forecast.sim import simulate
from paceline.rules.outer.base import Coefficients, Outer
from paceline.rules.recipes import make_rule
from paceline.rules.rule import Rule
from paceline.run.attach import attach

__all__ = ["agree", "check_outer", "check_rule", "one_worker_is_the_program", "repeat", "resume", "slices"]

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
State = dict[str, Tensor]
WORKERS, EPOCHS, SAMPLES, BATCH, STOP = 3, 3, 50, 4, 7


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum, for the small training."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def check_rule(rule: Rule | str, optimizer: MakeOptimizer = sgd) -> None:
    """Check all laws for `rule`; for a rule of blocks also those of its outer step.

    Args:
        rule: a `Rule`, or text.
        optimizer: parameters -> an optimizer for the rule.

    Raises:
        AssertionError: a law is broken.
        RuleError: the rule is asynchronous.
    """
    built = make_rule(rule, {})
    if not built.schedule.workers_meet:
        raise RuleError(f"{built.text()} is asynchronous; the laws here are for rules whose workers exchange together")
    if built.schedule.exchanges_blocks:
        check_outer(built.merging)
    for law in (one_worker_is_the_program, agree, repeat, resume):
        law(built, optimizer)


def check_outer(outer: Outer, workers: int = 4) -> None:
    """The laws of an outer step: `slices`, and that `origin` of a block is what the last `step` returned."""
    slices(outer, workers)
    anchor, state = _begin(outer)
    ahead = 0.0
    for block in range(1, 6):
        c = _coefficients(outer, block, workers, ahead)
        start = outer.step(anchor, _delta(block), state, c, torch.empty_like(anchor)).clone()
        ahead = c.next_momentum
        following = _coefficients(outer, block + 1, workers, ahead)
        origin = outer.origin(anchor, state, following, torch.empty_like(anchor))
        assert torch.equal(origin, start), (
            f"block {block + 1} does not start where the step of block {block} ended: `origin` has to return, bit "
            f"for bit, what `step` returned; they differ by up to {float((origin - start).abs().max()):.3g}"
        )
        assert bool(anchor.isfinite().all()), f"the model is not finite after block {block}: {anchor}"


def slices(outer: Outer, workers: int = 4) -> None:
    """A step on slices of the parameters equals the step on all of them, bit for bit."""
    whole, whole_state = _begin(outer)
    parts, parts_state = _begin(outer)
    for block in range(1, 6):
        c = _coefficients(outer, block, workers, 0.0)
        outer.step(whole, _delta(block), whole_state, c, torch.empty_like(whole))
        for part in (slice(0, 64), slice(64, 65), slice(65, None)):
            cut = {name: tensor[part] for name, tensor in parts_state.items()}
            outer.step(parts[part], _delta(block)[part], cut, c, torch.empty_like(parts[part]))
    for name, one, other in [("anchor", whole, parts), *((n, whole_state[n], parts_state[n]) for n in whole_state)]:
        assert torch.equal(one, other), (
            f"{name} differs by up to {float((one - other).abs().max()):.3g} when the step runs on slices: an outer "
            "step has to be element-wise, and to change the anchor and its state in place"
        )


def one_worker_is_the_program(rule: Rule | str, optimizer: MakeOptimizer = sgd) -> None:
    """With one worker the program trains the same bits as without paceline."""
    plain, ours = _train(None, optimizer)(), _train(rule, optimizer)()
    assert _same(plain, ours), "one worker ends with another model than the program without paceline"


def agree(rule: Rule | str, optimizer: MakeOptimizer = sgd) -> None:
    """All workers end with the same bits."""
    first, *others = _simulate(_train(rule, optimizer))
    for rank, other in enumerate(others, 1):
        assert _same(first, other), f"worker {rank} ends with another model than worker 0"


def repeat(rule: Rule | str, optimizer: MakeOptimizer = sgd) -> None:
    """The same seed gives the same bits again."""
    one, other = (_simulate(_train(rule, optimizer))[0] for _ in range(2))
    assert _same(one, other), "two runs of the same training end with different models"


def resume(rule: Rule | str, optimizer: MakeOptimizer = sgd) -> None:
    """A run that is stopped in the middle of a block and resumed ends with the same bits."""
    whole = _simulate(_train(rule, optimizer))[0]
    with tempfile.TemporaryDirectory() as folder:
        _simulate(_train(rule, optimizer, save=Path(folder)))
        resumed = _simulate(_train(rule, optimizer, load=Path(folder)))[0]
    assert _same(whole, resumed), (
        "a resumed run ends with another model: the outer step has to keep its state in its `tensors`"
    )


# -- helpers ---------------------------------------------------------------------------------------------------------


def _begin(outer: Outer) -> tuple[Tensor, State]:
    anchor = torch.randn(200, generator=torch.Generator().manual_seed(0))
    return anchor, {name: torch.zeros_like(anchor) for name in outer.tensors}


def _delta(block: int) -> Tensor:
    return 0.1 * torch.randn(200, generator=torch.Generator().manual_seed(block))


def _coefficients(outer: Outer, block: int, workers: int, ahead: float) -> Coefficients:
    return Coefficients(
        momentum=outer.momentum_at(block, workers),
        lr=outer.lr_at(block, workers),
        ahead=ahead,
        next_momentum=outer.momentum_at(block + 1, workers),
        block=block,
    )


def _train(
    rule: Rule | str | None, optimizer: MakeOptimizer, *, save: Path | None = None, load: Path | None = None
) -> Callable[[], State]:
    """A worker's program: a small training that returns its model; without paceline if `rule` is None."""

    def program() -> State:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        steps = optimizer(model.parameters())
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(SAMPLES, 6, generator=generator), torch.arange(SAMPLES) % 3)
        loader = DataLoader(data, BATCH, shuffle=True)
        run = attach(model, steps, rule) if rule is not None else None
        if run is not None and load is not None:
            run.resume(load / "saved")
        for _ in range(run.epoch if run else 0, EPOCHS):
            for inputs, targets in run.share(loader) if run else loader:
                steps.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                steps.step()
                if run is not None and save is not None and run.minibatches == STOP:
                    run.save(save / "saved")
                    run.abandon()
                    return {}
        if run is not None:
            run.close()
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    return program


def _simulate(program: Callable[[], State]) -> list[State]:
    torch.manual_seed(5)
    return [state or {} for state in simulate(program, WORKERS)]


def _same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
