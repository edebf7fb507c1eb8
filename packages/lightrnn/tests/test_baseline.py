# SPDX-License-Identifier: Apache-2.0
"""The ordinary models, what they weigh, and what their exchange costs beside LightRNN's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from lightrnn_helpers import same_bits, simulate, state_of
from paceline import CheckpointError, MismatchError, UnsupportedError
from paceline_lightrnn import PADDING, LightRNN, WordRNN, WordTable, parameter_bytes, sizes

CHOICES: list[dict[str, Any]] = [
    {},
    {"tied": True, "cell": "gru"},
    {"output": "adaptive", "layers": 2},
    {"output": (3,), "cell": "rnn", "dropout": 0.5},
]


def make(words: int = 12, dimension: int = 5, **choices: Any) -> WordRNN:
    torch.manual_seed(0)
    model = WordRNN(words, dimension, **choices)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.double().eval()


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", CHOICES)
def test_log_probabilities_are_those_of_the_distribution(choices: dict[str, Any]) -> None:
    model = make(**choices)
    words = torch.randint(12, (3, 6))
    whole, end = model.log_prob(words)
    state, found = model.begin(3), []
    for t in range(6):
        log_probs = model.distribution(state)
        torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(3, dtype=torch.float64))
        found.append(log_probs.gather(1, words[:, t : t + 1])[:, 0])
        state = model.advance(state.detach(), words[:, t])
    torch.testing.assert_close(torch.stack(found, 1), whole)
    torch.testing.assert_close(state, end)
    names, best = model.next_words(end, 4)
    torch.testing.assert_close(model.distribution(end).gather(1, names), best)


def test_the_full_softmax_is_written_out() -> None:
    model = make(dimension=4)
    cell = nn.LSTMCell(4, 4).double()
    cell.load_state_dict({n.removesuffix("_l0"): p for n, p in model.recurrent.state_dict().items()})
    h, c = torch.zeros(2, 1, 4, dtype=torch.float64)
    for last, word in [(0, 5), (5, 3)]:
        h, c = cell(model.word_in[[last]], (h, c))
        wanted = (model.word_out @ h[0] + model.word_bias).log_softmax(0)[word]
    torch.testing.assert_close(model.log_prob(torch.tensor([[5, 3]]))[0][0, 1], wanted)


@pytest.mark.parametrize("output", ["full", "adaptive"])
def test_padding_costs_nothing(output: str) -> None:
    model = make(output=output)
    words = torch.tensor([[4, 2, 1], [3, PADDING, PADDING]])
    log_probs = model.log_prob(words)[0]
    assert log_probs[1, 1:].tolist() == [0.0, 0.0]
    torch.testing.assert_close(model.loss(words)[0], -log_probs.sum() / 4)


@pytest.mark.parametrize("choices", CHOICES)
def test_a_model_is_the_same_when_it_comes_back(tmp_path: Path, choices: dict[str, Any]) -> None:
    model = make(**choices)
    model.save(tmp_path)
    back = WordRNN.load(tmp_path).eval()
    words = torch.randint(12, (2, 3))
    assert torch.equal(back.log_prob(words)[0], model.log_prob(words)[0])
    with pytest.raises(CheckpointError, match="wanted is"):
        LightRNN.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        WordRNN.load(tmp_path)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"output": "half"}, "no output 'half'; there are full, adaptive"),
        ({"output": "adaptive", "tied": True}, "leave `tied` away"),
        ({"output": "adaptive", "words": 1}, "the 1 words less 1"),
        ({"output": (7, 3)}, r"got \(7, 3\)"),
        ({"output": (12,)}, r"got \(12,\)"),
        ({"output": (3, 7)}, "vectors of 5 / 16 numbers"),
        ({"words": 0}, "1 word at least"),
        ({"cell": "lstn"}, "no cell"),
    ],
)
def test_what_cannot_be_made_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make(**choices)


def test_words_that_are_none_are_refused() -> None:
    with pytest.raises(MismatchError, match="got 12 to 12"):
        make().log_prob(torch.tensor([[12]]))
    with pytest.raises(MismatchError, match="got 1 and 12"):
        make().begin(1, 12)
    with pytest.raises(MismatchError, match="got 13"):
        make().next_words(make().begin(1), 13)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [*CHOICES[:3], {"cell": "rnn", "layers": 2}, {"output": "full"}])
def test_sizes_are_known_before(choices: dict[str, Any]) -> None:
    light = {name: value for name, value in choices.items() if name in ("layers", "cell", "tied")}
    table = WordTable.random(30)
    assert parameter_bytes(30, 6, **light) == sizes.sizes_of(LightRNN(table, 6, **light))
    model = WordRNN(30, 6, **choices)
    found = parameter_bytes(30, 6, **{"output": "full", **choices})
    assert found == sizes.sizes_of(model)
    assert found.total == sum(p.numel() * 4 for p in model.parameters())
    assert found.vectors == found.total - sum(p.numel() * 4 for p in model.recurrent.parameters())


def test_ten_million_words_take_sixty_megabytes_or_eighty_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    light = parameter_bytes(10_000_000, 1000, tied=True)
    assert light == (25_300_000, 25_300, 32_032_000)
    assert light.total <= 60e6
    full = parameter_bytes(10_000_000, 1000, output="full")
    assert full.input == 40_000_000_000 and full.output == 40_040_000_000
    monkeypatch.setattr("paceline_lightrnn.baseline.available_bytes", lambda device: 25_000_000_000)
    with pytest.raises(UnsupportedError, match=r"80\.1 GB .*40\.0 GB at the input, 40\.0 GB at the output.*25\.0 GB"):
        WordRNN(10_000_000, 1000)
    with pytest.raises(UnsupportedError, match=r"Take LightRNN, which has 0\.0827 GB"):
        WordRNN(10_000_000, 1000, output="adaptive")


def test_the_memory_that_is_there_is_found(tmp_path: Path) -> None:
    found = sizes.available_bytes("cpu")
    assert found is None or found > 2**20
    assert sizes.available_bytes("meta") is None
    path = tmp_path / "meminfo"
    assert sizes._of_the_system(path) is None
    path.write_text("MemTotal:  9 kB\nMemAvailable:    3 kB\n")
    assert sizes._of_the_system(path) == 3072
    assert sizes._of_the_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 400\nfile 7000\nanon_thp 3\n")
    assert sizes._of_the_group(tmp_path) is None
    (tmp_path / "memory.max").write_text("5000\n")
    assert sizes._of_the_group(tmp_path) == 4600


# -- on several workers ------------------------------------------------------------------------------------------------


def train(make_model: Any, rule: str, words: Tensor) -> tuple[dict[str, Tensor], list[int], list[float]]:
    """A worker's model in the end, and bytes sent and loss after each step."""
    torch.manual_seed(1)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, sent = [], []
    with paceline.attach(model, optimizer, rule) as run:
        mine = words[run.world.rank :: run.world.size]
        state = model.begin(mine.shape[0])
        for t in range(4):
            optimizer.zero_grad()
            loss, state = model.loss(mine[:, 5 * t : 5 * t + 5], state.detach())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            sent.append(run.bytes_sent)
    return state_of(model), sent, losses


@pytest.mark.parametrize("rule", ["bmuf(period=2)", "sync", "averaging(period=2)"])
def test_workers_end_with_the_same_model(rule: str) -> None:
    words = torch.randint(3, (6, 20)) * 7
    table = WordTable.random(22)

    def program() -> Any:
        return train(lambda: LightRNN(table, 6, tied=True), rule, words)

    one, other = simulate(program, 2)
    assert same_bits(one[0], other[0])
    assert one[2][-1] < one[2][0]


def test_the_bytes_of_a_block_fall_by_the_parameters_ratio() -> None:
    words = torch.randint(400, (4, 20))
    table = WordTable.random(400)
    models: list[Any] = [lambda: LightRNN(table, 8), lambda: WordRNN(400, 8)]
    sent, sizes_ = [], []
    for make_model in models:
        found = simulate(partial(train, make_model, "bmuf(period=2)", words), 2)
        sent.append(found[0][1][3] - found[0][1][1])
        sizes_.append(sizes.sizes_of(make_model()).total)
    headers = sent[0] - sizes_[0]
    assert 0 <= headers < 200  # the same of every model
    assert sent[1] - headers == sizes_[1] > 5 * sizes_[0]
