# SPDX-License-Identifier: Apache-2.0
"""What a program does to its weights besides the optimizer: under every rule it holds, is refused, or is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline.errors import UnsupportedError
from tests.helpers import CLASSES, FEATURES, attached, learn, make_data

WORKERS, BATCH, PASSES = 3, 4, 3
Change = Callable[[nn.Sequential], object]
Holds = Callable[[nn.Sequential], bool]


@dataclass(frozen=True)
class Kind:
    """A change of weights.

    Attributes:
        change: makes it.
        holds: whether a model has it.
        once: whether it is made before or after the first pass, and not after each step.
    """

    change: Change
    holds: Holds
    once: bool = False


def weight(model: nn.Sequential, layer: int = 0) -> Tensor:
    return model[layer].weight.data  # type: ignore[union-attr, return-value]


MASK = (torch.arange(8 * FEATURES) % 3 > 0).float().view(8, FEATURES)
ANEW = torch.linspace(-0.3, 0.3, 8 * FEATURES).view(8, FEATURES)


@torch.no_grad()
def clamp_parameter(model: nn.Sequential) -> None:
    model[0].weight.clamp_(-0.2, 0.2)  # type: ignore[union-attr, operator]


CHANGES: dict[str, Change] = {
    "clamp": lambda m: weight(m).clamp_(-0.2, 0.2),
    "clamp a parameter": clamp_parameter,
    "max-norm": lambda m: weight(m).renorm_(2, 0, 0.5),
    "project": lambda m: weight(m).sub_(weight(m).mean(1, keepdim=True)),
    "weight norm": lambda m: weight(m).copy_(nn.functional.normalize(weight(m), dim=1)),
    "prune": lambda m: weight(m).mul_(MASK),
    "tie by copy": lambda m: weight(m, 2)[:, :FEATURES].copy_(weight(m)),
    "quantize": lambda m: weight(m).mul_(64).round_().div_(64),
    "begin anew": lambda m: weight(m).copy_(ANEW),
    "load a part": lambda m: m[0].load_state_dict({"weight": ANEW, "bias": torch.zeros(8)}),
}
HOLDS: dict[str, Holds] = {
    "clamp": lambda m: float(weight(m).abs().max()) <= 0.2 + 1e-6,
    "clamp a parameter": lambda m: float(weight(m).abs().max()) <= 0.2 + 1e-6,
    "max-norm": lambda m: float(weight(m).norm(dim=1).max()) <= 0.5 + 1e-6,
    "project": lambda m: float(weight(m).mean(1).abs().max()) < 1e-6,
    "weight norm": lambda m: torch.allclose(weight(m).norm(dim=1), torch.ones(8), atol=1e-5),
    "prune": lambda m: not bool(weight(m)[MASK == 0].any()),
    "tie by copy": lambda m: torch.allclose(weight(m, 2)[:, :FEATURES], weight(m), atol=1e-6),
    "quantize": lambda m: bool((weight(m) * 64 == (weight(m) * 64).round()).all()),
    "begin anew": lambda m: float((weight(m) - ANEW).abs().max()) < 0.1,
    "load a part": lambda m: float((weight(m) - ANEW).abs().max()) < 0.1,
}
KINDS = {name: Kind(CHANGES[name], HOLDS[name], name in ("begin anew", "load a part")) for name in CHANGES}
LOCKSTEP = [
    "sync",
    "one_bit(warmup=2)",
    "power(rank=1, warmup=2)",
    "top_k(ratio=0.5, warmup=2)",
    "one_bit_adam(warmup=4)",
]
BLOCKS = [
    "averaging(period=2)",
    "averaging(period=2, overlap=1)",
    "averaging(period=2, warmup=3, fragments=2)",
    "bmuf(period=2)",
    "bmuf(period=2, overlap=1, fragments=2)",
    "bmuf_adam(period=2)",
    "diloco(period=2)",
    "streaming_diloco(period=2, fragments=2, overlap=1)",
    "auto(first=2, probe=0)",
]
GRADIENTS = ["asgd", "ssp(staleness=2)", "adadelay", "staleness_aware", "dc_asgd", "momentum_tuned"]
DELTAS = ["asgd(period=2)", "ssp(staleness=2, period=2)", "easgd(period=2)"]
FAST = ("sync", "bmuf(period=2)", "asgd", "easgd(period=2)")


def program(rule: str, kind: Kind, before: bool = False) -> bool:
    """Whether the model that a worker exports has the change.

    Args:
        rule: of the run.
        kind: of the change.
        before: whether it is made between attach and the first pass.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    if "adam" in rule:
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.001 if kind.once else 0.01)
    else:
        momentum = 0.9 if "tuned" in rule else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if kind.once else 0.2, momentum=momentum)
    with paceline.attach(model, optimizer, rule) as run:
        shared = run.share(DataLoader(make_data(48), BATCH))
        if before:
            kind.change(model)
        for number in range(PASSES):
            for x, y in shared:
                learn(model, optimizer, x, y)
                if not kind.once:
                    kind.change(model)
            if kind.once and number == 0 and not before:
                kind.change(model)
    return kind.holds(run.model_for_export())


def outcome(rule: str, kind: str, caplog: pytest.LogCaptureFixture, before: bool = False) -> str:
    torch.manual_seed(5)
    caplog.clear()
    try:
        with caplog.at_level(logging.WARNING, "paceline"):
            held = paceline.simulate(lambda: program(rule, KINDS[kind], before), WORKERS)
    except UnsupportedError as error:
        assert "0.weight" in str(error) or "2.weight" in str(error)
        return "refused"
    said = [text for text in caplog.messages if "besides its optimizer" in text]
    assert len(said) <= 2
    if any("0.weight" in text or "2.weight" in text for text in said):
        return "named"
    return "holds" if all(held) else "silent"


TABLE = [
    pytest.param(rule, marks=[] if rule in FAST else [pytest.mark.full])
    for rule in (*LOCKSTEP, *BLOCKS, *GRADIENTS, *DELTAS)
]


@pytest.mark.parametrize("rule", TABLE)
def test_no_change_of_weights_is_lost_in_silence(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    """In lockstep each worker makes the same change; a block is exchanged within its last step, before the change."""
    found = {kind: outcome(rule, kind, caplog) for kind in KINDS}
    expected = "holds" if rule in LOCKSTEP else "refused" if rule in GRADIENTS else "named"
    assert found == dict.fromkeys(KINDS, expected)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("sync", "holds"), ("bmuf(period=2)", "named"), ("asgd", "refused"), ("asgd(period=2)", "named")],
)
def test_weights_that_are_loaded_after_attach_are_not_lost_either(
    rule: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert outcome(rule, "load a part", caplog, before=True) == expected


def test_what_the_program_puts_back_before_the_step_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    """Binary weights in the forward pass, and an average that is swapped in for an evaluation."""

    def swapping(rule: str) -> None:
        with attached(nn.Sequential(nn.Linear(FEATURES, CLASSES)), rule, lr=0.1) as (run, model, optimizer):
            shared = run.share(DataLoader(make_data(48), BATCH))
            for _ in range(2):
                for x, y in shared:
                    kept = weight(model).clone()
                    weight(model).sign_()
                    nn.functional.cross_entropy(model(x), y).backward()
                    weight(model).copy_(kept)
                    optimizer.step()
                    optimizer.zero_grad()
                kept_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                model.load_state_dict({name: tensor * 0.5 for name, tensor in kept_state.items()})
                model.load_state_dict(kept_state)
                with run.global_model():
                    pass

    for rule in ("bmuf(period=2)", "asgd", "asgd(period=2)", "averaging(period=2, overlap=1)"):
        with caplog.at_level(logging.WARNING, "paceline"):
            paceline.simulate(lambda rule=rule: swapping(rule), WORKERS)
    assert not [text for text in caplog.messages if "besides its optimizer" in text]
