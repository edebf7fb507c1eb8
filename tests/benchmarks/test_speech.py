# SPDX-License-Identifier: Apache-2.0
"""The speech benchmark: its LSTM is torch's, stacked workers are single ones, and espeak-ng says what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from paceline_plugins.forecast import simulate_stacked
from tests.benchmarks.modules import FOLDER, imported

B, T, F, H = 3, 9, 7, 5
TIMES = torch.tensor([T, 4, 6])
ORDER = [1, 2, 3, 0]  # torch's i, f, g, o among o, i, f, g

if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not beside the package", allow_module_level=True)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Modules of the benchmark, which go out of sight again."""
    with imported("_speech", "_speech_voices", "_speech_reader") as found:
        yield found


def as_torch(weight: Tensor) -> Tensor:
    """One direction's weights, (4 H, ...), in torch's order of gates."""
    return weight.unflatten(0, (4, H))[ORDER].flatten(0, 1)


def turned() -> Tensor:
    """Each utterance's places in the other order."""
    places = torch.arange(T).expand(B, T)
    return torch.where(places < TIMES[:, None], TIMES[:, None] - 1 - places, places)


def test_the_lstm_is_that_of_torch_on_packed_sequences(modules: dict[str, ModuleType]) -> None:
    torch.manual_seed(0)
    ours = modules["_speech_reader"].Bidirectional(F, H)
    theirs = nn.LSTM(F, H, batch_first=True, bidirectional=True)
    given, bias = ours.given.weight.view(2, 4 * H, F), ours.given.bias.view(2, 4 * H)
    with torch.no_grad():
        for way, end in enumerate(("", "_reverse")):
            getattr(theirs, f"weight_ih_l0{end}").copy_(as_torch(given[way]))
            getattr(theirs, f"weight_hh_l0{end}").copy_(as_torch(ours.u[way]))
            getattr(theirs, f"bias_ih_l0{end}").copy_(as_torch(bias[way]))
            getattr(theirs, f"bias_hh_l0{end}").zero_()
    x = torch.randn(B, T, F, requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, TIMES, batch_first=True, enforce_sorted=False)
    whole, _ = nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)
    inside = (torch.arange(T) < TIMES[:, None])[:, :, None]
    found = ours(x, turned())
    assert torch.allclose(found * inside, whole, atol=1e-5)

    weights = torch.randn_like(whole) * inside
    ours_of = torch.autograd.grad((found * weights).sum(), [x, ours.u, ours.given.weight, ours.given.bias])
    names = ("weight_hh_l0", "weight_hh_l0_reverse", "weight_ih_l0", "weight_ih_l0_reverse", "bias_ih_l0_reverse")
    x_of, *theirs_of = torch.autograd.grad((whole * weights).sum(), [x, *(getattr(theirs, name) for name in names)])
    same = [*ours_of[1], *ours_of[2].view(2, 4 * H, F), ours_of[3].view(2, 4 * H)[1]]
    assert torch.allclose(ours_of[0], x_of, atol=1e-5)
    assert all(torch.allclose(as_torch(a), b, atol=1e-5) for a, b in zip(same, theirs_of, strict=True))


@pytest.mark.parametrize("layers", [1, 2])
def test_stacked_workers_learn_as_single_ones(modules: dict[str, ModuleType], layers: int) -> None:
    reader, workers = modules["_speech_reader"], 3
    torch.manual_seed(0)
    heard = torch.randn(1, workers, B, T, modules["_speech"].FEATURES)
    numbers = torch.randint(1, 27, (1, workers, B, 3))
    batch = (heard, TIMES.expand(1, workers, B), numbers, torch.tensor([3, 1, 2]).expand(1, workers, B))

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = reader.Listener(4, layers)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    model, optimizer = start()
    found = simulate_stacked(model, reader.loss_of, optimizer, "averaging(period=1)", zip(*batch, strict=True))
    singles = []
    for worker in range(workers):
        model, optimizer = start()
        reader.loss_of(model, *(tensor[0, worker] for tensor in batch)).backward()
        optimizer.step()
        singles.append(model.state_dict())
    for name, parameter in found.parameters.items():
        mean = torch.stack([single[name] for single in singles]).mean(0)
        assert torch.allclose(parameter, mean, atol=1e-5), name


def test_padding_is_not_heard(modules: dict[str, ModuleType]) -> None:
    reader = modules["_speech_reader"]
    torch.manual_seed(0)
    model = reader.Listener(4, 2)
    heard = torch.randn(B, T, modules["_speech"].FEATURES)
    other = torch.where((torch.arange(T) < TIMES[:, None])[:, :, None], heard, torch.randn_like(heard))
    given = (TIMES, torch.randint(1, 27, (B, 3)), torch.tensor([3, 1, 2]))
    assert torch.equal(reader.loss_of(model, heard, *given), reader.loss_of(model, other, *given))
    assert reader.read(model, heard, TIMES) == reader.read(model, other, TIMES)


@pytest.mark.processes
def test_words_are_spoken_and_batched_alike_for_any_number_of_workers(modules: dict[str, ModuleType]) -> None:
    speech, why = modules["_speech"], modules["_speech_voices"].missing()
    if why:
        pytest.skip(why)
    said = speech.record(("the", "return", "value", "module"), 24, held_out=False)
    again = speech.record(("the", "return", "value", "module"), 24, held_out=False)
    assert all(torch.equal(tensor, getattr(again, name)) for name, tensor in vars(said).items())
    assert {word for place in range(24) for word in said.text(place).split()} <= {"the", "return", "value", "module"}
    assert bool((said.times > said.lengths).all())
    (single, *_), (four, *_) = (list(speech.minibatches(said, 64, 2, workers, seed=0)) for workers in (1, 4))
    times = single[0].shape[2]
    assert torch.equal(single[0][0, 0], four[0][0, 0, :times])
    assert not set(modules["_speech_voices"].manners(True)) & set(modules["_speech_voices"].manners(False))
