# SPDX-License-Identifier: Apache-2.0
"""Gradients that are exchanged while backward goes on: N workers are one worker with N times the batch.

A program is written once, as a loop over `side.roles`: a worker plays its own role, and one process without paceline
plays all of them and takes the mean. Whatever a program does with backward, both must end with the same model.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.communication.virtual.transport import VirtualTransport
from paceline.update.engine.blocks import outer_state
from tests.helpers import State, distance, same_bits, simulate, state_of
from tests.tables import each_value_fast

N = 3
F64 = torch.float64
STEPS = 5
ALL = (STEPS,) * N
UNEVEN = (5, 2, 4)


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models, too, are exchanged in many chunks."""
    monkeypatch.setattr(outer_state, "SMALL_ELEMENTS", 64)
    monkeypatch.setattr(outer_state, "SMALL_CODED", 64)
    monkeypatch.setattr(VirtualTransport, "coarse", 1)


class Side:
    """A worker that plays its role, or one process that plays all of them.

    Args:
        steps: of each role.
        rule: for the workers.
    """

    def __init__(self, steps: tuple[int, ...] = ALL, rule: str = "sync") -> None:
        found = paceline.communication.virtual.transport.current()
        self.rank = None if found is None else found.world.rank
        self._steps, self._rule = steps, rule
        self.run: paceline.Run | None = None

    def attach(self, model: Any, optimizer: Any) -> None:
        if self.rank is not None:
            self.run = paceline.attach(model, optimizer, self._rule, timeout_s=20)

    def steps(self) -> range:
        return range(max(self._steps) if self.rank is None else self._steps[self.rank])

    def roles(self, step: int) -> list[int]:
        return [r for r in range(N) if step < self._steps[r]] if self.rank is None else [self.rank]

    def mean(self, step: int, loss: Callable[[int], Tensor]) -> Tensor:
        """The mean of the roles' losses."""
        return torch.stack([loss(role) for role in self.roles(step)]).mean()

    def close(self) -> None:
        if self.run is not None:
            self.run.close()


Loop = Callable[[Side], State]


def numbers(step: int, role: int, *shape: int, more: int = 0) -> Tensor:
    """What `role` sees in `step`."""
    g = torch.Generator().manual_seed(1000 * step + 10 * role + more)
    return torch.randn(*shape, generator=g, dtype=F64)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def loss_of(model: nn.Module, step: int, role: int, more: int = 0) -> Tensor:
    target = numbers(step, role, 6, 4, more=5 + more)
    return (model(numbers(step, role, 6, 10, more=more)) - target).square().mean()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def compare(loop: Loop, steps: tuple[int, ...] = ALL, rule: str = "sync", tolerance: float = 1e-12) -> None:
    """Workers hold the same bits, and those are what one process makes of all roles together."""
    want = loop(Side(steps))
    outs = simulate(lambda: loop(Side(steps, rule)), N)
    for out in outs[1:]:
        assert same_bits(out, outs[0])
    assert distance(outs[0], want) < tolerance
    assert distance(want, loop(Side((0,) * N))) > 1e-3, "nothing was learned, so nothing was tested"


uneven = pytest.mark.parametrize("steps", [ALL, UNEVEN], ids=["even", "uneven"])
to_none = pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])


# -- what is in .grad --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["sync", "sync(reproducible=True)", "averaging(period=2, warmup=9)"])
def test_the_mean_is_there_when_backward_returns(rule: str) -> None:
    def program() -> list[list[Tensor]]:
        side, model = Side(rule=rule), net()
        optimizer = momentum(model)
        side.attach(model, optimizer)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            twin = copy.deepcopy(model)
            for p in twin.parameters():
                p.grad = None
            torch.stack([loss_of(twin, step, role) for role in range(N)]).mean().backward()
            loss_of(model, step, side.roles(step)[0]).backward()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-14)
            seen.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
            optimizer.step()
            for p, g in zip(model.parameters(), seen[-1], strict=True):
                assert torch.equal(p.grad, g)  # type: ignore[arg-type]
        side.close()
        return seen

    outs = simulate(program, N)
    for one, other in zip(outs[0], outs[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_chunks_leave_before_the_pass_is_over() -> None:
    """Else none of these tests would test what they are for."""

    def program() -> int:
        side, model = Side(), net()
        optimizer = momentum(model)
        side.attach(model, optimizer)
        under_way = []

        def look(parameter: Tensor) -> None:
            assert side.run is not None
            under_way.append(len(side.run._engine.gradient_exchanges.updates[0]._running))

        for step in range(3):
            if step == 2:
                model[0].weight.register_post_accumulate_grad_hook(look)
            loss_of(model, step, side.roles(step)[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        side.close()
        return under_way[0]

    assert min(simulate(program, N)) >= 3


Body = Callable[[Side, Any, int], object]


def loop_of(
    body: Body,
    model: Callable[[], Any] = net,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum,
    to_none: bool = True,
) -> Loop:
    """The usual loop around `body(side, model, step)`, which puts the gradients there."""

    def loop(side: Side) -> State:
        made = model()
        stepped = optimizer(made)
        side.attach(made, stepped)
        for step in side.steps():
            stepped.zero_grad(set_to_none=to_none)
            if body(side, made, step) is not SKIP:
                stepped.step()
        side.close()
        return state_of(made)

    return loop


SKIP = object()
"""What a body returns whose step the program leaves out."""


def plain(side: Side, model: Any, step: int) -> None:
    """One backward pass over a mean."""
    side.mean(step, lambda role: loss_of(model, step, role)).backward()


@uneven
def test_clipping_acts_on_the_mean(steps: tuple[int, ...]) -> None:
    norms = []

    def body(side: Side, model: Any, step: int) -> None:
        side.mean(step, lambda role: (role + 1) * loss_of(model, step, role)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))

    compare(loop_of(body), steps)
    assert max(norms) > 0.5


# -- several passes before a step --------------------------------------------------------------------------------------

PASSES = {
    "constant": [3, 3, 3, 3, 3],
    "growing": [1, 2, 3, 4, 5],
    "last_short": [3, 3, 1, 3, 3],
    "falling": [4, 3, 2, 1, 2],
}


@pytest.mark.parametrize(("passes", "steps", "to_none"), each_value_fast(list(PASSES), [ALL, UNEVEN], [True, False]))
def test_accumulation(passes: str, steps: tuple[int, ...], to_none: bool) -> None:
    def body(side: Side, model: Any, step: int) -> None:
        for k in range(PASSES[passes][step]):
            (side.mean(step, lambda role, k=k: loss_of(model, step, role, k)) / PASSES[passes][step]).backward()

    compare(loop_of(body, to_none=to_none), steps)


@to_none
@pytest.mark.parametrize("retain", [True, False])
def test_two_losses(retain: bool, to_none: bool) -> None:
    def body(side: Side, model: Any, step: int) -> None:
        if retain:
            losses = torch.stack([loss_of(model, step, role) for role in side.roles(step)])
            losses.mean().backward(retain_graph=True)
            losses.square().mean().backward()
        else:
            plain(side, model, step)
            side.mean(step, lambda role: model[:2](numbers(step, role, 4, 10)).square().mean()).backward()

    compare(loop_of(body, to_none=to_none))


@to_none
def test_a_step_that_the_program_leaves_out(to_none: bool) -> None:
    """On all workers alike, such as for a loss that is too large; the passes before the next one may be fewer."""

    def body(side: Side, model: Any, step: int) -> object:
        for k in range(1 if step in (2, 4) else 2):
            side.mean(step, lambda role, k=k: loss_of(model, step, role, k)).backward()
        return SKIP if step == 1 else None

    compare(loop_of(body, to_none=to_none))


@pytest.mark.parametrize("attacks", [1, 3])
def test_passes_that_are_thrown_away(attacks: int) -> None:
    """Adversarial samples: backward for the input's sake, then zero_grad, then the pass that counts."""

    def body(side: Side, model: Any, step: int) -> None:
        def loss(x: Tensor, role: int) -> Tensor:
            return (model(x) - numbers(step, role, 6, 4, more=5)).square().mean()

        def attacked(role: int) -> Tensor:
            x = numbers(step, role, 6, 10).requires_grad_()
            for _ in range(attacks):
                loss(x, role).backward()
                assert x.grad is not None
                x = (x + 0.1 * x.grad.sign()).detach().requires_grad_()
            return x.detach()

        inputs = {role: attacked(role) for role in side.roles(step)}
        model.zero_grad()
        side.mean(step, lambda role: loss(inputs[role], role)).backward()

    compare(loop_of(body))


@pytest.mark.parametrize("last", [False, True], ids=["before", "last"])
@uneven
def test_no_sync_adds_up(steps: tuple[int, ...], last: bool) -> None:
    """Nothing is sent within; also where it is the last pass, after which no step may differ from its peers'."""

    def body(side: Side, model: Any, step: int) -> None:
        for k in range(2):
            loss = side.mean(step, lambda role, k=k: loss_of(model, step, role, k))
            if side.run is None or k != last:
                loss.backward()
                continue
            before = side.run.bytes_sent
            with side.run.no_sync():
                loss.backward()
            assert side.run.bytes_sent == before

    compare(loop_of(body), steps)


def test_no_sync_of_one_worker_alone() -> None:
    """A pass that is no training, on one worker only, between two steps."""

    def body(side: Side, model: Any, step: int) -> None:
        if side.run is not None and side.rank == 1:
            with side.run.no_sync():
                loss_of(model, step, 7).backward()
        model.zero_grad()
        plain(side, model, step)

    compare(loop_of(body))


# -- parameters that have no gradient ----------------------------------------------------------------------------------
class Branches(nn.Module):
    """A trunk and three branches, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(10, 12).double()
        self.branch = nn.ModuleList(nn.Linear(12, 10).double() for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branch[which](torch.tanh(self.trunk(x)))


CHOICES: dict[str, Callable[[int, int], int]] = {
    "by_step": lambda step, role: step % 3,
    "by_worker": lambda step, role: role,
    "by_both": lambda step, role: (step * role) % 3,
    "late": lambda step, role: 0 if step < 3 else 2,
}


@pytest.mark.parametrize(("choice", "steps", "to_none"), each_value_fast(list(CHOICES), [ALL, UNEVEN], [True, False]))
def test_unused_parameters(choice: str, steps: tuple[int, ...], to_none: bool) -> None:
    """Absent everywhere stays absent (momentum must not move it); absent here takes the peers' mean."""

    def body(side: Side, model: Any, step: int) -> None:
        side.mean(
            step, lambda role: model(numbers(step, role, 5, 10), CHOICES[choice](step, role)).square().mean()
        ).backward()

    compare(loop_of(body, Branches, to_none=to_none), steps)


@to_none
def test_a_gradient_that_comes_only_in_a_later_pass(to_none: bool) -> None:
    def body(side: Side, model: Any, step: int) -> None:
        for k in range(3 if step % 2 else 2):
            side.mean(
                step, lambda role, k=k: model(numbers(step, role, 5, 10, more=k), (k + step) % 3).square().mean()
            ).backward()

    compare(loop_of(body, Branches, to_none=to_none))


# -- backward that fails -----------------------------------------------------------------------------------------------
class Fragile(torch.autograd.Function):
    """The identity, whose backward fails when it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            raise ZeroDivisionError("in the middle of backward")
        return gradient, None


def fragile_loss(model: nn.Sequential, step: int, role: int, fails: bool, more: int = 0) -> Tensor:
    x = Fragile.apply(model[:2](numbers(step, role, 6, 10, more=more)), fails)
    return model[2:](x).square().mean()


@pytest.mark.parametrize("who", [(1,), (0, 1, 2)], ids=["one", "all"])
@to_none
def test_a_pass_that_fails_and_is_repeated(who: tuple[int, ...], to_none: bool) -> None:
    """With other numbers the second time, so that what had left already is stale."""

    def body(side: Side, model: Any, step: int) -> None:
        if step in (0, 2) and side.rank in who:
            with pytest.raises(ZeroDivisionError):
                fragile_loss(model, step, 5, True, more=3).backward()
            model.zero_grad(set_to_none=to_none)
        side.mean(step, lambda role: fragile_loss(model, step, role, False)).backward()

    compare(loop_of(body, to_none=to_none))


@pytest.mark.parametrize("last", [False, True], ids=["then_go_on", "then_close"])
@pytest.mark.parametrize("who", [(1,), (0, 1, 2)], ids=["one", "all"])
def test_a_pass_that_fails_and_is_given_up(who: tuple[int, ...], last: bool) -> None:
    """Those who fail go on with the next minibatch, or close the run."""
    at, steps = (4, 5) if last else (2, 6)

    def body(side: Side, model: Any, step: int) -> object:
        try:
            fragile_loss(model, step, side.roles(step)[0], step == at and side.rank in who).backward()
        except ZeroDivisionError:
            return SKIP
        return None

    outs = simulate(lambda: loop_of(body)(Side((steps,) * N)), N)
    assert all(same_bits(out, outs[0]) for out in outs)


# -- gradients that backward did not make ------------------------------------------------------------------------------
@uneven
@pytest.mark.parametrize("how", ["by_hand", "autograd_grad", "half_by_hand"])
def test_gradients_assigned(how: str, steps: tuple[int, ...]) -> None:
    def body(side: Side, model: Any, step: int) -> None:
        def assign(parameters: list[nn.Parameter]) -> None:
            for k, p in enumerate(parameters):
                p.grad = torch.stack([numbers(step, role, *p.shape, more=k) for role in side.roles(step)]).mean(0)

        parameters = list(model.parameters())
        if how == "by_hand":
            assign(parameters)
        elif how == "autograd_grad":
            found = torch.autograd.grad(side.mean(step, lambda role: loss_of(model, step, role)), parameters)
            for p, g in zip(parameters, found, strict=True):
                p.grad = g
        else:
            model[4].requires_grad_(False)
            plain(side, model, step)
            model[4].requires_grad_(True)
            assign(list(model[4].parameters()))

    compare(loop_of(body), steps)


@pytest.mark.parametrize("late", [False, True], ids=["before_attach", "after_attach"])
@pytest.mark.parametrize("accumulated", [False, True], ids=["tensor", "accumulated"])
def test_a_hook_of_the_users(accumulated: bool, late: bool) -> None:
    """Such as one that clips each parameter's gradient as it comes; after attach it runs after ours."""

    def hooked(model: nn.Module) -> None:
        def double(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(2)

        for p in model.parameters():
            if accumulated:
                p.register_post_accumulate_grad_hook(double)
            else:
                p.register_hook(lambda g: g * 3)

    def make() -> nn.Module:
        model = net()
        if not late:
            hooked(model)
        return model

    def body(side: Side, model: Any, step: int) -> None:
        if late and step == 0:
            hooked(model)
        plain(side, model, step)

    compare(loop_of(body, make))


# -- what autograd can do ----------------------------------------------------------------------------------------------
@to_none
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_activation_checkpointing(reentrant: bool, shared: bool, to_none: bool) -> None:
    """A reentrant segment is a backward pass inside the pass; with `shared`, a layer is inside and outside."""

    def make() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(10, 10).double() for _ in range(4)])

    def body(side: Side, model: Any, step: int) -> None:
        def segment(x: Tensor) -> Tensor:
            return torch.tanh(model[2](torch.tanh(model[1](x))))

        def loss(role: int) -> Tensor:
            x = torch.tanh(model[0](numbers(step, role, 5, 10)))
            x = checkpoint(segment, x, use_reentrant=reentrant)
            return model[1 if shared else 3](x).square().mean()

        side.mean(step, loss).backward()

    compare(loop_of(body, make, to_none=to_none))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile(backend: str) -> None:
    fast: dict[int, Any] = {}

    def body(side: Side, model: Any, step: int) -> None:
        compiled = fast.setdefault(id(model), torch.compile(model, backend=backend))
        side.mean(step, lambda role: loss_of(compiled, step, role)).backward()

    compare(loop_of(body))


@pytest.mark.parametrize(
    ("shape", "steps", "to_none"),
    each_value_fast(["joint", "two_passes", "critics", "two_passes_of_g"], [ALL, UNEVEN], [True, False]),
)
def test_two_optimizers(shape: str, steps: tuple[int, ...], to_none: bool) -> None:
    """A GAN: G's loss puts gradients into D, which D's next zero_grad throws away."""

    def loop(side: Side) -> State:
        torch.manual_seed(3)
        g, d = nn.Linear(8, 10).double(), net(1)
        og, od = torch.optim.SGD(g.parameters(), lr=0.1), momentum(d)
        side.attach([g, d], [od, og])
        for step in side.steps():

            def fake(role: int, k: int, step: int = step) -> Tensor:
                return d(g(numbers(step, role, 6, 8, more=k)))

            def real(role: int, step: int = step) -> Tensor:
                return (d(numbers(step, role, 6, 10, more=4)) - 1).square().mean()

            for k in range(3 if shape == "critics" else 1):
                od.zero_grad(set_to_none=to_none)
                if shape == "two_passes":
                    side.mean(step, real).backward()
                    side.mean(step, lambda role, k=k: fake(role, k).square().mean()).backward()
                else:
                    side.mean(step, lambda role, k=k: real(role) + fake(role, k).square().mean()).backward()
                od.step()
            og.zero_grad(set_to_none=to_none)
            for k in range(2 if shape == "two_passes_of_g" else 1):
                side.mean(step, lambda role, k=k: (fake(role, 6 + k) - 1).square().mean()).backward()
            og.step()
        side.close()
        return {f"{n}.{k}": v for n, m in (("g", g), ("d", d)) for k, v in state_of(m).items()}

    compare(loop, steps)


def tied() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Linear(10, 10).double(), nn.Linear(10, 10).double()
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(10, 4).double())


def penalised(side: Side, model: Any, step: int) -> None:
    """A gradient of a gradient: autograd.grad with create_graph inside the loss."""

    def loss(role: int) -> Tensor:
        x = numbers(step, role, 6, 10).requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    side.mean(step, loss).backward()


def with_a_graph(side: Side, model: Any, step: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True.*")
        side.mean(step, lambda role: loss_of(model, step, role)).backward(create_graph=True)
    for p in model.parameters():
        p.grad = p.grad.detach()


def norm_as_a_loss(side: Side, model: Any, step: int) -> None:
    """The norm of .grad as a second loss: its pass runs through a graph that made the gradients."""

    def loss(role: int) -> Tensor:
        out = loss_of(model, step, role)
        found = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
        return out + 0.1 * sum(g.square().sum() for g in found)

    side.mean(step, loss).backward()


@pytest.mark.parametrize(
    ("body", "model"),
    [
        pytest.param(plain, tied, id="tied weights"),
        pytest.param(penalised, net, id="a penalty of the gradient"),
        pytest.param(with_a_graph, net, id="create_graph"),
        pytest.param(norm_as_a_loss, net, id="a norm as a loss"),
    ],
)
def test_what_autograd_can_do(body: Body, model: Callable[[], nn.Module]) -> None:
    compare(loop_of(body, model, lambda m: torch.optim.SGD(m.parameters(), lr=0.05)))


@pytest.mark.filterwarnings("ignore:.*[Cc]omplex.*:UserWarning")
def test_complex_parameters() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module()
        model.w = nn.Parameter(torch.randn(10, 7, dtype=torch.complex128))
        model.b = nn.Parameter(torch.randn(7, dtype=F64))
        return model

    def body(side: Side, model: Any, step: int) -> None:
        side.mean(
            step, lambda role: ((numbers(step, role, 5, 10) + 0j) @ model.w + model.b).abs().square().mean()
        ).backward()

    loop = loop_of(body, make, lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
    compare(lambda side: {k: torch.view_as_real(v) if v.is_complex() else v for k, v in loop(side).items()})


@uneven
def test_channels_last(steps: tuple[int, ...]) -> None:
    """Strides of parameters and gradients are the user's affair; numbers must go where they belong."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3)).double()
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def body(side: Side, model: Any, step: int) -> None:
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        side.mean(
            step,
            lambda role: model(numbers(step, role, 2, 3, 7, 7).to(memory_format=torch.channels_last)).square().mean(),
        ).backward()

    compare(loop_of(body, make), steps)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    def program() -> None:
        model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        paceline.attach(model, optimizer, "sync", timeout_s=20)
        model(torch.arange(4)).sum().backward()
        optimizer.step()

    with pytest.raises(paceline.UnsupportedError, match=r"0\.weight has a sparse gradient.*sparse=False"):
        simulate(program, 2)


# -- inf and nan -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["first", "last", "middle"])
def test_nan_in_one_chunk_of_one_worker(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """All workers use the mean of their peers, also in chunks that had been sent before the overflow was known."""

    def body(side: Side, model: Any, step: int) -> None:
        bad = {"first": model[4].bias, "middle": model[2].weight, "last": model[0].weight}[place]
        if side.rank == 1 and step == 2:
            handle = bad.register_hook(lambda g: g * float("nan"))
        roles = [0, 2] if step == 2 and side.rank is None else side.roles(step)
        torch.stack([loss_of(model, step, role) for role in roles]).mean().backward()
        if side.rank == 1 and step == 2:
            handle.remove()

    with caplog.at_level(logging.WARNING, logger="paceline"):
        compare(loop_of(body))
    said = [r.getMessage() for r in caplog.records]
    assert said and all("worker 1 on" in line and "worker 0" not in line for line in said)


@pytest.mark.parametrize("rule", ["sync", "one_bit(warmup=1)", "power(rank=1, warmup=1)", "top_k(ratio=0.1, warmup=0)"])
def test_nan_everywhere_stops_the_step_and_training_can_go_on(rule: str) -> None:
    def program() -> State:
        side, model = Side(rule=rule), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        side.attach(model, optimizer)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, step, side.roles(step)[0])
            before = state_of(model)
            if step == 3:
                (loss * float("nan")).backward()
                with pytest.raises(paceline.NonFiniteError, match="inf or nan"):
                    optimizer.step()
                assert same_bits(state_of(model), before)
            else:
                loss.backward()
                optimizer.step()
                assert not same_bits(state_of(model), before)
        side.close()
        return state_of(model)

    outs = simulate(program, N)
    assert all(same_bits(out, outs[0]) for out in outs)
    assert all(bool(torch.isfinite(v).all()) for v in outs[0].values())


@pytest.mark.parametrize("rule", ["sync", "sync(codec='int8')", "one_bit(warmup=2)"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_scaler_skips_on_all_alike(rule: str, passes: int) -> None:
    """An overflow everywhere in step 2: no worker makes that step, and the scale falls on all."""

    def program() -> tuple[State, float, int]:
        side, model = Side(rule=rule), net().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        side.run = run = paceline.attach(model, optimizer, rule, scaler=scaler, timeout_s=20)
        role = side.roles(0)[0]
        for step in range(5):
            optimizer.zero_grad()
            for k in range(passes):
                loss = (model(numbers(step, role, 6, 10, more=k).float()) - 1).square().mean()
                scaler.scale(loss * float("inf") if step == 2 else loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        side.close()
        return state_of(model), scaler.get_scale(), run.minibatches

    outs = simulate(program, N)
    assert all(same_bits(out[0], outs[0][0]) for out in outs)
    assert [out[1:] for out in outs] == [(4.0, 4)] * N
    assert all(bool(torch.isfinite(v).all()) for v in outs[0][0].values())


# -- several models and codecs -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rule", ["one_bit(warmup=1)", "sync(codec='int8')", "power(rank=2, warmup=1)", "top_k(ratio=0.2)"]
)
def test_lossy_codecs_hold_replicas_together_through_it_all(rule: str) -> None:
    """Accumulation, unused parameters, leavers and a nan at once; the bits stay the same on all."""

    def body(side: Side, model: Any, step: int) -> None:
        role = side.roles(step)[0]
        for k in range(1 + step % 2):
            loss = model(numbers(step, role, 5, 10, more=k), (step + role) % 3).square().mean()
            (loss * (float("nan") if (step, role) == (3, 2) else 1)).backward()

    loop = loop_of(body, Branches, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    outs = simulate(lambda: loop(Side(UNEVEN, rule)), N)
    assert all(same_bits(out, outs[0]) for out in outs)
    assert all(bool(torch.isfinite(v).all()) for v in outs[0].values())
    assert distance(outs[0], state_of(Branches())) > 1e-2


def test_resume_in_a_run_with_several_passes(tmp_path: Any) -> None:
    """What was learned about passes belongs to the checkpoint: the same chunks go at the same time."""

    def program(resume: bool, stop: int | None) -> tuple[State, int]:
        side, model = Side(rule="one_bit(warmup=1)"), net()
        optimizer = momentum(model)
        side.attach(model, optimizer)
        run = side.run
        assert run is not None
        if resume:
            run.resume(tmp_path / "c")
        for step in range(run.minibatches, 6):
            optimizer.zero_grad()
            for k in range(3):
                loss_of(model, step, side.roles(step)[0], k).backward()
            optimizer.step()
            if run.minibatches == stop:
                run.save(tmp_path / "c")
                run.abandon()
                return state_of(model), 0
        sent = run.bytes_sent
        side.close()
        return state_of(model), sent

    whole = simulate(lambda: program(False, None), N)
    simulate(lambda: program(False, 3), N)
    resumed = simulate(lambda: program(True, None), N)
    assert all(same_bits(a[0], b[0]) for a, b in zip(whole, resumed, strict=True))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()
