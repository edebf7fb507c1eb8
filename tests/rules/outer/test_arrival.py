# SPDX-License-Identifier: Apache-2.0
"""What owners do with pushes: against numbers worked out by hand and references in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.errors import UnsupportedError
from paceline.rules.outer import (
    AdaDelay,
    Arrival,
    Average,
    BlockMomentum,
    DelayCompensated,
    Elastic,
    FrozenAdam,
    Nesterov,
    Push,
    Rescaled,
    Share,
    StalenessAware,
    Sum,
    TunedMomentum,
)
from paceline.rules.outer.base import State

F64 = torch.float64
EVERY: list[Arrival] = [
    *(Sum(), Share(), StalenessAware(), AdaDelay(), AdaDelay(0.5), TunedMomentum(), TunedMomentum(False)),
    *(DelayCompensated(), DelayCompensated("adaptive"), DelayCompensated("normalized"), Elastic()),
]


def push(delay: int = 0, update: int = 1, **besides: float) -> Push:
    given: dict[str, float] = {"workers": 4, "lr": 0.1} | besides
    return Push(delay, update, **given)  # type: ignore[arg-type]


def zeros(outer: Arrival, like: Tensor) -> State:
    return {name: torch.zeros_like(like) for name in outer.tensors}


def mended(outer: Arrival, g: Tensor, anchor: Tensor, origin: Tensor, state: State, p: Push) -> Tensor:
    found = g.clone()
    outer.mend(found, anchor, origin if outer.needs_origin else None, state, p)
    return found


def random(n: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def as_bits(x: Tensor) -> list[int]:
    found: list[int] = x.view(torch.int32).tolist()
    return found


# -- what all have in common ----------------------------------------------------------------------
def test_what_takes_pushes_and_what_does_not() -> None:
    assert all(isinstance(outer, Arrival) for outer in EVERY)
    for outer in (Average(), BlockMomentum(), Nesterov(), FrozenAdam()):
        assert not isinstance(outer, Arrival)


def test_only_tuned_momentum_changes_the_momentum() -> None:
    assert [outer for outer in EVERY if outer.momentum(0.9, push(3, 5)) != 0.9] == [
        *(TunedMomentum(), TunedMomentum(False))
    ]


@pytest.mark.parametrize("outer", EVERY)
def test_a_piece_may_be_mended_by_itself(outer: Arrival) -> None:
    """Element-wise: the halves of a piece give the bits of the whole, state included."""
    whole_state, states = zeros(outer, torch.zeros(64)), [zeros(outer, torch.zeros(32)) for _ in range(2)]
    for t in range(1, 5):
        g, anchor, origin = random(64, t), random(64, 10 + t), random(64, 20 + t)
        whole = mended(outer, g, anchor, origin, whole_state, push(t % 3, t))
        halves = [
            mended(outer, g[k : k + 32], anchor[k : k + 32], origin[k : k + 32], states[k // 32], push(t % 3, t))
            for k in (0, 32)
        ]
        assert torch.equal(whole, torch.cat(halves))
    for name, tensor in whole_state.items():
        assert torch.equal(tensor, torch.cat([state[name] for state in states]))


# -- factors on the rate --------------------------------------------------------------------------
def test_factors_by_hand() -> None:
    p = push(delay=6, update=10, workers=4, lr=0.5)
    assert Sum().rate(p) == 1 and Rescaled().rate(p) == 7 / 4
    assert Share().rate(p) == 0.25
    assert StalenessAware().rate(p) == pytest.approx(1 / 6)
    assert DelayCompensated().rate(p) == 1
    assert AdaDelay().rate(p) == 1
    assert AdaDelay(3).rate(p) == pytest.approx(1 / (1 + 0.5 * 3 * 4))
    assert Elastic(0.8).rate(p) == pytest.approx(0.2)


# -- delay compensation ---------------------------------------------------------------------------
def test_on_a_quadratic_the_undelayed_gradient_comes_back() -> None:
    """f = h w^2 / 2 with lam g^2 = h: the linear correction is the truth. All numbers have few bits: no tolerance."""
    h, w_then, w_now = 2.0, 1.0, 0.25
    g = h * w_then
    outer = DelayCompensated(strength=h / g**2)
    found = mended(outer, torch.tensor([g]), torch.tensor([w_now]), torch.tensor([w_then]), {}, push(3))
    assert found.item() == h * w_now != g


@pytest.mark.parametrize("kind", ["constant", "adaptive", "normalized"])
@pytest.mark.parametrize(
    ("start", "pushes"),
    [(3, [{}] * 6), (0.5, [{"lr": lr, "highest_lr": 0.2} for lr in (0.2, 0.11, 0.15, 0.1, 0.05, 0.002)])],
)
def test_nothing_is_mended_before_the_start_and_all_after_it(
    kind: str, start: float, pushes: list[dict[str, float]]
) -> None:
    """Both begin with the fourth push; the mean squares are those of all pushes."""
    late, always = DelayCompensated(kind, 0.5, start=start), DelayCompensated(kind, 0.5)
    states = [zeros(outer, torch.zeros(50)) for outer in (late, always)]
    for t, about in enumerate(pushes, start=1):
        g, w, origin = random(50, t), random(50, 10 + t), random(50, 20 + t)
        found, other = (
            mended(outer, g, w, origin, state, push(2, t, **about))
            for outer, state in zip((late, always), states, strict=True)
        )
        assert as_bits(found) == as_bits(g if t <= 3 else other) != as_bits(other if t <= 3 else g)


@pytest.mark.parametrize("outer", [DelayCompensated(strength=3.0), DelayCompensated("adaptive", limit=0.5)])
def test_without_a_delay_the_gradient_keeps_its_bits(outer: DelayCompensated) -> None:
    g = torch.cat([random(1000, 1), torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e30, -1e30])])
    w = random(g.numel(), 2)
    assert as_bits(mended(outer, g, w, w.clone(), zeros(outer, g), push())) == as_bits(g)


def reference_compensation(
    kind: str, lam0: float, decay: float, limit: float, pushes: list[tuple[NDArray[np.float64], ...]]
) -> list[NDArray[np.float64]]:
    """The equations as they are printed, element by element."""
    n = len(pushes[0][0])
    ms, found = np.zeros(n), []
    for g, w, backup in pushes:
        out = np.empty(n)
        for j in range(n):
            ms[j] = decay * ms[j] + (1 - decay) * g[j] * g[j]
            adaptive, normalized = lam0 / math.sqrt(ms[j] + 1e-7), lam0 / (ms[j] + 1e-12)
            lam = {"constant": lam0, "adaptive": adaptive, "normalized": normalized}[kind]
            correction = lam * g[j] * g[j] * (w[j] - backup[j])
            bound = limit * abs(g[j])
            out[j] = g[j] + min(bound, max(-bound, correction))
        found.append(out)
    return found


@pytest.mark.parametrize(
    ("outer", "lam0"),
    [
        (DelayCompensated(), 0.04),
        (DelayCompensated(strength=1.5, limit=0.3), 1.5),
        (DelayCompensated("adaptive"), 2.0),
        (DelayCompensated("adaptive", 0.7, decay=0.5), 0.7),
        (DelayCompensated("adaptive", decay=0.0, limit=1.0), 2.0),
        (DelayCompensated("normalized", 0.7, decay=0.5), 0.7),
    ],
)
def test_compensation_against_the_equations(outer: DelayCompensated, lam0: float) -> None:
    rng = np.random.default_rng(0)
    pushes = [tuple(rng.normal(size=20) for _ in range(3)) for _ in range(6)]
    limit = math.inf if outer.limit is None else outer.limit
    want = reference_compensation(outer.kind, lam0, outer.decay, limit, pushes)
    state = zeros(outer, torch.zeros(20, dtype=F64))
    for t, (numbers, expected) in enumerate(zip(pushes, want, strict=True), start=1):
        g, w, backup = (torch.from_numpy(x) for x in numbers)
        np.testing.assert_allclose(mended(outer, g, w, backup, state, push(t, t)).numpy(), expected, rtol=1e-12)


def test_the_mean_square_is_changed_before_it_is_used() -> None:
    """At the first push MS = (1 - decay) g^2, and not 0, by which the correction would be some 1600 times as large."""
    outer = DelayCompensated("adaptive", strength=1.0, decay=0.75)
    state = {"squares": torch.zeros(1, dtype=F64)}
    g, w, backup = (torch.tensor([value], dtype=F64) for value in (1.0, 0.5, 0.25))
    found = mended(outer, g, w, backup, state, push(1))
    assert state["squares"].item() == 0.25
    assert found.item() == pytest.approx(1 + 0.25 / math.sqrt(0.25 + 1e-7))


def test_the_limit_keeps_the_sign() -> None:
    g, w, backup = torch.tensor([2.0, -2.0]), torch.tensor([-50.0, -50.0]), torch.zeros(2)
    free = mended(DelayCompensated(strength=1.0), g, w, backup, {}, push(1))
    assert free.tolist() == [-198.0, -202.0]  # the first has turned
    bound = mended(DelayCompensated(strength=1.0, limit=0.5), g, w, backup, {}, push(1))
    assert bound.tolist() == [1.0, -3.0]


# -- AdaDelay -------------------------------------------------------------------------------------
def test_adadelay_against_a_loop() -> None:
    rng, lr, n = np.random.default_rng(1), 0.3, 10
    gradients, delays = rng.normal(size=(30, n)), rng.integers(0, 9, size=30)
    outer = AdaDelay()
    w, state = torch.zeros(n, dtype=F64), {"squares": torch.zeros(n, dtype=F64)}
    want = np.zeros(n)
    for t in range(1, 31):
        tau = int(delays[t - 1])
        for j in range(n):
            total = sum(s / (s + delays[s - 1]) * gradients[s - 1, j] ** 2 for s in range(1, t + 1))
            c = math.sqrt(total / t)
            want[j] -= gradients[t - 1, j] / (1 / lr + c * math.sqrt(t + tau))
        p = push(tau, t, lr=lr)
        g = mended(outer, torch.from_numpy(gradients[t - 1]), w, w, state, p)
        w.sub_(g, alpha=lr * outer.rate(p))
        np.testing.assert_allclose(w.numpy(), want, rtol=1e-12)


# -- momentum -------------------------------------------------------------------------------------
def test_tuned_momentum_by_hand() -> None:
    outer, p = TunedMomentum(), push(workers=4, momentum=0.5)
    assert outer.momentum(0.5, p) == -0.25
    assert outer.rate(p) == pytest.approx(1.25 / 0.5)
    assert TunedMomentum(False).rate(p) == 1
    assert TunedMomentum(False).momentum(0.5, p) == -0.25
    alone = push(workers=1, momentum=0.9)
    assert (outer.momentum(0.9, alone), outer.rate(alone)) == (0.9, 1.0)


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
@pytest.mark.parametrize("m", [0.0, 0.5, 0.9])
def test_a_steady_gradient_moves_as_far(workers: int, m: float) -> None:
    """lr / (1 - m) an update, by torch's own SGD with the momentum and the rate that the rule gives."""
    outer, p = TunedMomentum(), push(workers=workers, momentum=m)
    x = nn.Parameter(torch.zeros(1, dtype=F64))
    optimizer = torch.optim.SGD([x], lr=0.1 * outer.rate(p))
    optimizer.param_groups[0]["momentum"] = outer.momentum(m, p)
    move = 0.0
    for _ in range(800):
        before, x.grad = x.item(), torch.ones(1, dtype=F64)
        optimizer.step()
        move = x.item() - before
    assert move == pytest.approx(-0.1 / (1 - m))


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_plain_sgd_has_the_implicit_momentum_and_the_rule_takes_it_off(workers: int) -> None:
    """The user's momentum is the implicit one: nothing explicit is left, and the mean moves as with that momentum."""
    m = 1 - 1 / workers
    outer, p = TunedMomentum(), push(workers=workers, momentum=m)
    assert outer.momentum(m, p) == 0
    # D_{t+1} = (1 - 1/N) D_t - (lr_e / N) G, and lr_e / N = lr: the sequential recursion with the user's numbers
    assert outer.rate(p) / workers == pytest.approx(1)


def test_only_sgd_has_a_momentum_to_tune() -> None:
    x = [nn.Parameter(torch.zeros(1))]
    TunedMomentum().resolve(torch.optim.SGD(x, 0.1, momentum=0.9))
    with pytest.raises(
        UnsupportedError, match=r"tunes SGD's momentum, and the optimizer is Adam; use torch\.optim\.SGD"
    ):
        TunedMomentum().resolve(torch.optim.Adam(x))
    with pytest.raises(UnsupportedError, match="momentum must be below 1 to have a gain, got 1"):
        TunedMomentum().resolve(torch.optim.SGD(x, 0.1, momentum=1.0))
    for outer in (Sum(), Share(), AdaDelay(), DelayCompensated(), Elastic()):
        outer.resolve(torch.optim.Adam(x))


# -- elastic averaging ----------------------------------------------------------------------------
def test_the_pull_by_hand() -> None:
    outer, x, center = Elastic(0.5), torch.tensor([4.0, -2.0]), torch.tensor([0.0, 2.0])
    assert outer.elastic_pull(x, center, workers=2).tolist() == [1.0, -1.0]
    outer.elastic_step(center, x, workers=2)
    assert center.tolist() == [1.0, 1.0] and x.tolist() == [4.0, -2.0]
    assert outer.elastic_pull(x, torch.zeros(2), 2, out=x) is x
    assert x.tolist() == [1.0, -0.5]


def test_the_rate_is_the_share_of_the_distance() -> None:
    """An owner that adds rate * (x - c) makes the elastic step."""
    outer, x, center = Elastic(), random(100, 1, F64), random(100, 2, F64)
    want = center + outer.rate(push(workers=4)) * (x - center)
    outer.elastic_step(center, x, 4)
    torch.testing.assert_close(center, want)
