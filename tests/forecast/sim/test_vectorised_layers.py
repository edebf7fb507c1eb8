# SPDX-License-Identifier: Apache-2.0
"""Layers under stacked workers: each ends where virtual workers do, running statistics included, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import paceline
from paceline.errors import NonFiniteError, UnsupportedError
from paceline_plugins.forecast import simulate_grown, simulate_stacked
from tests.helpers import adam, momentum_sgd, sgd

N, STEPS, SIZE, CHANNELS, SIDE, CLASSES = 3, 11, 4, 2, 5, 3
Make = Callable[[Any], torch.optim.Optimizer]
Model = Callable[[], nn.Module]


def batches(workers: int = N) -> tuple[Tensor, Tensor]:
    """Pictures (steps, N, size, channels, side, side), other ones on each worker, and their classes."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS, workers, SIZE, CHANNELS, SIDE, SIDE, generator=g)
    x = x * torch.arange(1.0, 1 + workers).view(-1, 1, 1, 1, 1) + 0.3  # other statistics on each worker
    return x, torch.randint(0, CLASSES, (STEPS, workers, SIZE), generator=g)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y) + getattr(model, "aux", 0.0)


def conv(norm: nn.Module | None = None) -> nn.Sequential:
    """A small convolution with a layer in it; a bias before a normalisation has a gradient of rounding alone."""
    torch.manual_seed(1)
    layers = [nn.Conv2d(CHANNELS, 4, 3, padding=1, bias=False), norm or nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))


def one_by_one(start: Model, rule: str, make: Make, workers: int = N) -> tuple[dict[str, Tensor], Tensor]:
    """The global model's state, and all losses, by the production code."""
    x, y = batches(workers)

    def program() -> tuple[dict[str, Tensor], Tensor]:
        model = start()
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        losses = []
        with paceline.attach(model, optimizer, rule, guard=None) as run:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = loss_of(model, x[step, run.world.rank], y[step, run.world.rank])
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        vars(model).pop("aux", None)  # a tensor with a graph cannot be copied
        exported = run.model_for_export()
        named = {**dict(exported.named_parameters()), **dict(exported.named_buffers())}
        return {name: tensor.detach().clone() for name, tensor in named.items()}, torch.stack(losses)

    outs = paceline.simulate(program, workers)
    assert outs[0] is not None
    return outs[0][0], torch.stack([out[1] for out in outs if out is not None], 1)


def check(start: Model, rule: str, make: Make = sgd, workers: int = N) -> None:
    """Both ways end alike, and the user's model stays as it was."""
    model = start()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    found = simulate_stacked(model, loss_of, optimizer, rule, zip(*batches(workers), strict=True))
    expected, losses = one_by_one(start, rule, make, workers)
    torch.testing.assert_close(found.losses, losses, atol=1e-5, rtol=0)
    for name, tensor in (found.parameters | found.buffers).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)
    trained = [name for name, tensor in model.named_parameters() if tensor.requires_grad]
    assert sorted(found.parameters) == sorted(trained)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)


RULES: list[tuple[str, Make]] = [
    ("sync", momentum_sgd),
    ("averaging(period=4)", sgd),
    ("bmuf(period=4, warmup=3)", momentum_sgd),
    ("bmuf_adam(period=3)", adam),
    ("bmuf(period=4, overlap=2)", momentum_sgd),
]


@pytest.mark.parametrize(("rule", "make"), RULES, ids=[r for r, _ in RULES])
def test_running_statistics_are_every_workers_own(rule: str, make: Make) -> None:
    check(conv, rule, make)


OVERLAPS: list[tuple[str, Make]] = [
    ("averaging(period=4, overlap=4)", sgd),
    ("averaging(period=4, overlap=1, local_state='keep')", momentum_sgd),
    ("bmuf(period=4, overlap=3, warmup=2)", momentum_sgd),
    ("bmuf(period=4, overlap=2, local_state='compensate')", momentum_sgd),
    ("bmuf(period=3, overlap=3, ema=0.7, amplify=0.5)", sgd),
    ("bmuf_adam(period=4, overlap=2)", adam),
    ("bmuf_adam(period=3, overlap=3, local_state='average')", adam),
    ("diloco(period=4, overlap=2, gain='paper')", adam),
    ("bmuf(period=5, overlap=5)", momentum_sgd),  # the last exchange is under way at the end
]


@pytest.mark.parametrize(("rule", "make"), OVERLAPS, ids=[r for r, _ in OVERLAPS])
def test_exchanges_under_way_while_the_next_block_trains(rule: str, make: Make) -> None:
    check(lambda: conv(nn.GroupNorm(2, 4)), rule, make)


class Layer(nn.Module):
    """A layer of a function of it and its input; tensors that it keeps are buffers."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], **kept: Any) -> None:
        super().__init__()
        self.act = act
        for name, value in kept.items():
            if type(value) is Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, x)


def centred(layer: Any, x: Tensor) -> Tensor:
    """Puts a running mean in the place of the one before."""
    if layer.training:
        layer.centre = 0.9 * layer.centre + 0.1 * x.detach().mean((0, 2, 3))
    return x - layer.centre.view(-1, 1, 1)


class Shared(nn.Module):
    """Two layers with one weight and one normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.again = self.norm
        self.last = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.second(torch.relu(self.norm(self.first(x)))))
        return self.last(x.mean((2, 3)))


class Auxiliary(nn.Module):
    """Leaves a loss in an attribute, which is read in the same minibatch, and counts in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.aux, self.calls = conv(), torch.zeros(()), 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.calls += 1
        self.aux = x.square().mean() / self.calls
        return x


class Words(nn.Module):
    """Looks words up."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table, self.last = nn.Embedding(20, 6, **options), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        words = (3 * x.flatten(1)[:, :7]).long().clamp(-9, 10) + 9
        return self.last(self.table(words).mean(1))


def partly_frozen() -> nn.Module:
    """Normalisations that are evaluated, one of them frozen as well, beside one that trains."""
    torch.manual_seed(3)
    fixed, loose = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    model = conv(nn.Sequential(fixed, loose, nn.BatchNorm2d(4), nn.Dropout(0.5)))
    for layer in (fixed, loose, model[1][3]):
        layer.eval()
    fixed.running_mean.fill_(0.2)
    fixed.requires_grad_(False)
    return model


def weight_normed() -> nn.Module:
    model = conv(nn.GroupNorm(2, 4))
    parametrizations.weight_norm(model[0])
    return model


LAYERS: dict[str, Model] = {
    "momentum-none": lambda: conv(nn.BatchNorm2d(4, momentum=None)),
    "no-statistics": lambda: conv(nn.BatchNorm2d(4, track_running_stats=False)),
    "instance": lambda: conv(nn.InstanceNorm2d(4, affine=True)),
    "instance-statistics": lambda: conv(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "group": lambda: conv(nn.GroupNorm(2, 4)),
    "layer": lambda: conv(nn.LayerNorm([4, SIDE, SIDE])),
    "local-response": lambda: conv(nn.LocalResponseNorm(2)),
    "replaced-buffer": lambda: conv(Layer(centred, centre=torch.zeros(4))),
    "tied": Shared,
    "auxiliary-loss": Auxiliary,
    "partly-frozen": partly_frozen,
    "weight-norm": weight_normed,
    "padding": lambda: Words(padding_idx=9),
    "padding-from-the-end": lambda: Words(padding_idx=-11, scale_grad_by_freq=True, max_norm=0.9),
    "dropout-off": lambda: conv(nn.Dropout(0.0)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's, of weight norm
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_ends_where_virtual_workers_do(name: str) -> None:
    check(LAYERS[name], "bmuf(period=4)", momentum_sgd)


def noisy(layer: Any, x: Tensor) -> Tensor:
    """Noise of a generator of its own."""
    return x + torch.randn(x.shape, generator=layer.generator)


def remembering(layer: Any, x: Tensor) -> Tensor:
    """Keeps a mean in an attribute."""
    layer.mean = x.detach().mean() if layer.mean is None else 0.9 * layer.mean + 0.1 * x.detach().mean()
    return x - layer.mean


def listing(layer: Any, x: Tensor) -> Tensor:
    layer.seen.append(x.mean())
    return x


def masking(replaces: bool) -> Layer:
    """Writes into, or replaces, a buffer that is no number."""

    def act(layer: Any, x: Tensor) -> Tensor:
        if replaces:
            layer.mask = x.detach().mean((0, 2, 3)) > 0
        else:
            layer.mask.logical_not_()
        return x

    return Layer(act, mask=torch.ones(4, dtype=torch.bool))


def scaled(replaces: bool) -> Layer:
    """Writes into, or replaces, a parameter that is not trained."""

    def act(layer: Any, x: Tensor) -> Tensor:
        if replaces:
            layer.scale = nn.Parameter(0.5 * layer.scale + x.detach().mean(), requires_grad=False)
        else:
            layer.scale += 0.1
        return x * layer.scale

    return Layer(act, scale=nn.Parameter(torch.ones(()), requires_grad=False))


def tallying(layer: Any, x: Tensor) -> Tensor:
    """Counts what it sees in its data."""
    layer.tally = layer.tally + (x.detach() > 0).sum()
    return x


def growing(layer: Any, x: Tensor) -> Tensor:
    """A buffer that changes its shape."""
    layer.past = torch.cat([layer.past, x.detach().mean().view(1)])
    return x


def spectral() -> nn.Module:
    model = conv(nn.GroupNorm(2, 4))
    parametrizations.spectral_norm(model[0])
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES))


REFUSED: dict[str, tuple[Model, str]] = {
    "dropout": (lambda: conv(nn.Dropout(0.5)), "cannot be stacked"),
    "generator": (lambda: conv(Layer(noisy, generator=torch.Generator())), "cannot be stacked"),
    "attribute": (
        lambda: conv(Layer(remembering, mean=None)),
        "keeps a tensor in 1.mean from one minibatch to the next",
    ),
    "list": (lambda: conv(Layer(listing, seen=[])), "keeps a tensor in 1.seen"),
    "mask": (lambda: conv(masking(False)), "writes into 1.mask"),
    "replaced-mask": (lambda: conv(masking(True)), "writes into 1.mask"),
    "frozen": (lambda: conv(scaled(False)), "writes into 1.scale"),
    "replaced-frozen": (lambda: conv(scaled(True)), "writes into 1.scale"),
    "sparse": (lambda: Words(sparse=True), "table has sparse gradients"),
    "tally": (
        lambda: conv(Layer(tallying, tally=torch.zeros((), dtype=torch.int64))),
        "count differently in the buffer 1.tally",
    ),
    "shape": (lambda: conv(Layer(growing, past=torch.zeros(1))), r"buffer 1.past had the shape \(1,\) and has \(2,\)"),
    "spectral": (spectral, "cannot be stacked"),
    "synchronised": (lambda: conv(nn.SyncBatchNorm(4)), "SyncBatchNorm"),
    "lazy": (lazy, "1.weight has no shape yet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name: str) -> None:
    start, says = REFUSED[name]
    model = start()
    with pytest.raises(UnsupportedError, match=says):
        simulate_stacked(
            model,
            loss_of,
            sgd([p for p in model.parameters() if p.requires_grad]),
            "bmuf(period=4)",
            zip(*batches(), strict=True),
        )


def test_a_statistic_that_is_not_finite_is_refused() -> None:
    model, (x, y) = conv(Layer(centred, centre=torch.zeros(4))), batches()
    x[2, 1] = 3e38
    with pytest.raises(NonFiniteError, match="worker 1 after step 4"):
        simulate_stacked(model, loss_of, sgd(model.parameters()), "averaging(period=4)", zip(x, y, strict=True))


def test_a_number_of_workers_that_grows_takes_the_statistics_along() -> None:
    x, y = batches(1)
    each = [(x[step, 0], y[step, 0]) for step in range(STEPS)]
    grown = simulate_grown(
        (model := conv()), loss_of, sgd(model.parameters()), "averaging(period=2, grow='auto')", each * 4, 4
    )
    assert grown.buffers["1.running_mean"].isfinite().all() and int(grown.buffers["1.num_batches_tracked"]) > STEPS
    with pytest.raises(UnsupportedError, match="overlap=1"):
        simulate_grown(model, loss_of, sgd(model.parameters()), "averaging(period=2, overlap=1)", each, 4)
