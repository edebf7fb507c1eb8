# SPDX-License-Identifier: Apache-2.0
"""Commands for a trained LightRNN: evaluate a text, generate one, re-allocate the words."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline import UnsupportedError
from paceline_lightrnn import generate, rounds
from paceline_lightrnn.allocation import Allocation, reallocate
from paceline_lightrnn.building import Model, load_model
from paceline_lightrnn.commands.progress import Shown
from paceline_lightrnn.corpus import Corpus
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.preparing import VOCABULARY, open_train
from paceline_lightrnn.report import check_fits
from paceline_lightrnn.scoring import Score, score
from paceline_lightrnn.settings import Course, Settings
from paceline_lightrnn.state import PADDING
from paceline_lightrnn.text import Text, tokenizer
from paceline_lightrnn.training import ALLOCATION, COSTS
from paceline_lightrnn.vocabulary import Vocabulary

SETTINGS = "settings.json"


@dataclass(frozen=True)
class Judged:
    """The score of a text, and its number of unknown words."""

    score: Score
    unknown: int
    seconds: float
    damaged: int


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `generate`.

    Attributes:
        prompt: the beginning of the text.
        words: number of words after it.
        samples: number of texts.
        temperature: of sampling.
        top_k: sample among so many words only.
        beam: width of a beam search, instead of sampling.
        seed: of sampling.
    """

    prompt: str = ""
    words: int = 50
    samples: int = 3
    temperature: float = 1.0
    top_k: int | None = None
    beam: int | None = None
    seed: int = 0


def load(folder: Path) -> tuple[Model, Vocabulary]:
    """The model of a folder and its vocabulary."""
    model, vocabulary = load_model(folder), Vocabulary.load(folder / VOCABULARY)
    check_fits(model, vocabulary, folder)
    model.eval()
    return model, vocabulary


def judge(folder: Path, texts: Sequence[Path], show: Shown) -> Judged:
    """The perplexity of a text, read once as a stream."""
    model, vocabulary = load(folder)
    text = Text(texts, vocabulary.tokens, vocabulary.lower)
    with tempfile.TemporaryDirectory() as place:
        corpus = Corpus.write(text, vocabulary, Path(place) / "text")
        started, total = time.perf_counter(), len(corpus)
        found = score(model, corpus, progress=lambda words: show.doing("evaluating", words, total))
        unknown = int((corpus.ids == vocabulary.unknown).sum())
        return Judged(found, unknown, time.perf_counter() - started, corpus.damaged)


def generate_texts(folder: Path, options: GenerateOptions) -> list[str]:
    """Generate texts, without the prompt."""
    if options.samples < 1 or options.words < 1:
        raise UnsupportedError(f"--samples and --words are at least 1, got {options.samples} and {options.words}")
    model, vocabulary = load(folder)
    given = tokenizer(vocabulary.tokens, vocabulary.lower)(options.prompt)
    number = 1 if options.beam is not None else options.samples
    with torch.no_grad():
        state = model.begin(number, vocabulary.end)
        if given:
            ids = torch.tensor([vocabulary.ids(given, ended=False)]).repeat(number, 1)
            state = model.log_prob(ids, state)[1]
    if options.beam is not None:
        found = generate.beam(model, state, options.words, options.beam, length_penalty=1.0)[0]
    else:
        found = generate.sample(
            model,
            state,
            options.words,
            temperature=options.temperature,
            top_k=options.top_k,
            generator=torch.Generator().manual_seed(options.seed),
        )
    return [vocabulary.text(word for word in row if word != PADDING) for row in found.tolist()]


def allocate(folder: Path, texts: Sequence[Path], costs_file: Path | None, show: Shown) -> Allocation:
    """Re-allocate a trained model in place; it is saved only if the cost falls."""
    model, vocabulary = load(folder)
    if not isinstance(model, LightRNN):
        raise UnsupportedError(f"the model in {folder} has a vector for each word and no table to allocate words in")
    if costs_file is None:
        costs_file = folder / COSTS
        corpus = _corpus(folder, texts, vocabulary)
        course, total = _course(folder), len(corpus)
        costs = rounds.gather(
            model,
            corpus,
            length=course.length,
            window=course.window,
            progress=lambda words: show.doing("gathering costs", words, total),
        )
        rounds.save_costs(costs_file, costs, model.table)
    resume = folder / ALLOCATION / rounds.checksum(costs_file)[:16]
    loaded = rounds.load_costs(costs_file, model)
    resume.mkdir(parents=True, exist_ok=True)
    found = reallocate(
        loaded.source(model),
        model.table,
        progress=lambda phase, done, total: show.doing(f"allocating words: {phase}", done, total),
        resume=resume,
    )
    if found.after < found.before:
        model.table = found.table
        model.save(folder)
    return found


def _corpus(folder: Path, texts: Sequence[Path], vocabulary: Vocabulary) -> Corpus:
    if not texts:
        return open_train(folder)
    text = Text(texts, vocabulary.tokens, vocabulary.lower)
    return Corpus.ensure(text, vocabulary, folder / "corpus" / "reallocation")


def _course(folder: Path) -> Course:
    path = folder / SETTINGS
    return Settings.load(path).course if path.is_file() else Course()


def as_json(judged: Judged) -> str:
    """The result as JSON."""
    found = {
        "perplexity": judged.score.perplexity,
        "nats_per_word": judged.score.nats / judged.score.words,
        "words": judged.score.words,
        "unknown": judged.unknown,
        "seconds": judged.seconds,
    }
    return json.dumps(found)
