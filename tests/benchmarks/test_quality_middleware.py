# SPDX-License-Identifier: Apache-2.0
"""The middleware's three tasks: stacked networks are the networks themselves, and what may be seen of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from paceline_plugins.forecast.vectorised.vectorised_model import StackedModel
from tests.benchmarks.modules import FOLDER, imported

NAMES = ("_quality_blstm", "_quality_chat", "_quality_pictures")
WORKERS, SAMPLES = 3, 4

if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not beside the package", allow_module_level=True)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Modules of the benchmark, which go out of sight again."""
    with imported(*NAMES) as found:
        yield found


def batch_of(module: ModuleType) -> tuple[Tensor, Tensor]:
    """A minibatch for each worker, of anything."""
    if module.__name__ == "_quality_chat":
        asked, said = ((WORKERS, SAMPLES, length) for length in (module.QUESTION, module.ANSWER))
        return torch.randint(3, module.WORDS, asked), torch.randint(module.WORDS, said)
    if module.__name__ == "_quality_blstm":
        pieces = WORKERS, SAMPLES, module.STEPS
        return torch.randn(*pieces, module.BANDS), torch.randint(module.NONE, module.CLASSES, pieces)
    pictures = torch.randn(WORKERS, SAMPLES, 1, module.SIDE, module.SIDE)
    return pictures, torch.randint(len(module.SYMBOLS), (WORKERS, SAMPLES))


@pytest.mark.parametrize(("name", "kind"), list(zip(NAMES, ("Hearing", "Chat", "Layers"), strict=True)))
def test_stacked_networks_have_the_loss_and_the_gradient_of_each(
    modules: dict[str, ModuleType], name: str, kind: str
) -> None:
    torch.manual_seed(0)
    module = modules[name]
    model, batch = getattr(module, kind)(), batch_of(module)
    stacked = StackedModel(model, module.loss_of, WORKERS)
    losses = stacked.losses(batch)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    stacked.settle()
    for worker in range(WORKERS):
        alone = module.loss_of(model, *(part[worker] for part in batch))
        assert losses[worker].item() == pytest.approx(alone.item(), rel=1e-5)
        gradients = torch.autograd.grad(alone, list(model.parameters()))
        for mine, expected in zip(stacked.parameters.values(), gradients, strict=True):
            assert mine.grad is not None
            assert torch.allclose(mine.grad[worker], expected, atol=1e-5)


def test_an_answers_words_are_guessed_from_the_question_and_those_before(modules: dict[str, ModuleType]) -> None:
    chat = modules["_quality_chat"]
    torch.manual_seed(0)
    model, (questions, answers) = chat.Chat(), (part[0] for part in batch_of(chat))
    later = answers.clone()
    later[:, 5] = (answers[:, 5] + 1) % chat.WORDS
    scores, changed = (model(questions, said).view(SAMPLES, chat.ANSWER, -1) for said in (answers, later))
    assert torch.equal(scores[:, :6], changed[:, :6])
    assert not torch.equal(scores[:, 6], changed[:, 6])
    asked = questions.clone()
    asked[:, 0] = (questions[:, 0] + 1) % chat.WORDS
    assert not torch.equal(model(asked, answers), model(questions, answers))
