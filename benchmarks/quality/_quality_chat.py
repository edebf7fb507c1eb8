# SPDX-License-Identifier: Apache-2.0
"""Questions and answers: the name of a function and its arguments, and the first line of its documentation.

They come from the sources of Python's library and of torch. One LSTM, which can be stacked (`_speech_reader.py`), hears
the question's words and then says the answer, word by word. Whole files are held out, less the pairs that training has.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "char_lm"))

import torch
import torch.nn.functional as F
from _permutations import pieces
from _speech_reader import Recurrence
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data import library_files

QUESTION, ANSWER = 6, 12  # words; longer ones are cut
WORDS = 512  # the most frequent ones, and three more
NONE, UNKNOWN, START = 0, 1, 2  # START stands between question and answer
EMBEDDING, HIDDEN = 16, 16
HELD_OUT = 8  # one file in so many
FEW = 40  # files that are enough for a short training
NAME, WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+"), re.compile(r"[a-z]+|[0-9]+")

Pair = tuple[tuple[str, ...], tuple[str, ...]]


class Chat(nn.Module):
    """Scores of each word of the answer, from the question and the words before it."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, EMBEDDING)
        self.given, self.output = nn.Linear(EMBEDDING, 4 * hidden), nn.Linear(hidden, WORDS)
        self.u = nn.Parameter(torch.empty(1, 4 * hidden, hidden))
        for parameter in (*self.given.parameters(), self.u):
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)
        with torch.no_grad():
            self.given.bias.view(4, hidden)[2] += 1.0  # remember at first

    def forward(self, questions: Tensor, answers: Tensor) -> Tensor:
        """(B, QUESTION), padded in front, and (B, ANSWER) -> (B ANSWER, WORDS)."""
        heard = torch.cat([questions, F.pad(answers[:, :-1], (1, 0), value=START)], 1)
        gates = self.given(self.embedding(heard).flatten(0, 1)).view(1, *heard.shape, -1)
        states = Recurrence.apply(gates, self.u)[0][0, :, QUESTION:]
        scores: Tensor = self.output(states.flatten(0, 1))
        return scores


def loss_of(model: nn.Module, questions: Tensor, answers: Tensor) -> Tensor:
    """In nats per word; those that are not known count for nothing."""
    return F.cross_entropy(model(questions, answers), _told(answers).flatten(), ignore_index=NONE)


def _told(answers: Tensor) -> Tensor:
    return answers.where(answers != UNKNOWN, NONE)


# ---- Data


def pairs_of(source: str) -> Iterator[Pair]:
    """Of all functions and classes with documentation.

    >>> next(pairs_of('def getSize(path_name):\\n  "Size of it, in bytes."'))
    (('get', 'size', 'path', 'name'), ('size', 'of', 'it', 'in', 'bytes'))
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        arguments = [one.arg for one in node.args.args if one.arg != "self"] if hasattr(node, "args") else []
        asked = [word.lower() for name in (node.name, *arguments) for word in NAME.findall(name)]
        said = WORD.findall((ast.get_docstring(node) or "").strip().partition("\n")[0].lower())
        if asked and said:
            yield tuple(asked[:QUESTION]), tuple(said[:ANSWER])


def _read(files: Iterable[Path]) -> Iterator[Pair]:
    for path in files:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in other people's sources
            try:
                yield from pairs_of(path.read_text(encoding="utf-8"))
            except (SyntaxError, ValueError):
                continue


def _files(whole: bool) -> list[Path]:
    library = library_files(Path(sysconfig.get_paths()["stdlib"]))
    return [*library, *library_files(Path(torch.__file__).parent)] if whole else library[: HELD_OUT * FEW : HELD_OUT]


def made(folder: Path, whole: bool) -> dict[str, Tensor]:
    """`training` and `held_out` (pairs, QUESTION + ANSWER), words by number; kept in `folder`."""
    path = folder / f"chat-{'whole' if whole else 'few'}.safetensors"
    if not path.exists():
        parts: tuple[list[Path], list[Path]] = ([], [])
        for file in _files(whole):
            parts[zlib.crc32(file.name.encode()) % HELD_OUT == 0].append(file)
        training = dict.fromkeys(_read(parts[0]))
        held_out = [pair for pair in dict.fromkeys(_read(parts[1])) if pair not in training]
        counts = Counter(word for pair in training for part in pair for word in part)
        known = {word: number for number, (word, _) in enumerate(counts.most_common(WORDS - 3), 3)}
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file({"training": _numbers(training, known), "held_out": _numbers(held_out, known)}, unfinished)
        unfinished.replace(path)  # so that whoever finds it finds all of it
    return load_file(path)


def _numbers(pairs: Iterable[Pair], known: dict[str, int]) -> Tensor:
    rows = []
    for asked, said in pairs:
        question, answer = ([known.get(word, UNKNOWN) for word in part] for part in (asked, said))
        rows.append([*[NONE] * (QUESTION - len(question)), *question, *answer, *[NONE] * (ANSWER - len(answer))])
    return torch.tensor(rows)


@cache
def _samples(folder: Path, whole: bool, part: str) -> tuple[Tensor, Tensor]:
    questions, answers = made(folder, whole)[part].split([QUESTION, ANSWER], 1)
    return questions, answers


def batches(folder: Path, count: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One minibatch after another, in permutations of all pairs."""
    questions, answers = _samples(folder, count * batch > 5_000, "training")
    for mine in islice(pieces(len(questions), batch, seed), count):
        yield questions[mine], answers[mine]


@torch.no_grad()
def _judged(model: nn.Module, folder: Path) -> tuple[float, float]:
    questions, answers = _samples(folder, (folder / "chat-whole.safetensors").exists(), "held_out")
    scores, told = model(questions, answers), _told(answers).flatten()
    wrong = (scores.argmax(1) != told)[told != NONE]
    loss = F.cross_entropy(scores, told, ignore_index=NONE)
    return float(loss), float(wrong.float().mean())


def held_out_loss(model: nn.Module, folder: Path) -> float:
    """In nats per word; its exponential is the perplexity."""
    return _judged(model, folder)[0]


def held_out_error(model: nn.Module, folder: Path) -> float:
    """Share of words that are not the most likely one; one minus the accuracy."""
    return _judged(model, folder)[1]
