# SPDX-License-Identifier: Apache-2.0
"""Real text with sentiment: snippets of film reviews, each with the mean opinion of twenty readers.

They come in the source archive of the package vaderSentiment (MIT licence; Hutto and Gilbert, VADER: A Parsimonious
Rule-based Model for Sentiment Analysis of Social Media Text, ICWSM 2014), which pip fetches. Two files of the
archive are read, in memory: these and a lexicon of words with sentiment. A snippet's label is the sign of its score
(from -4 to 4); those near 0 are left out.
"""

from __future__ import annotations

import io
import random
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline import DataError
from paceline_dual.sequences import pad

RELEASE = "vaderSentiment==3.3.2"
ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
SNIPPETS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
LEXICON = "vaderSentiment-3.3.2/vaderSentiment/vader_lexicon.txt"
LARGEST = 50_000_000
"""Bytes that a file of an archive may have."""
CLEAR = 0.5
"""Least |score| of a snippet whose readers took a side."""
LONGEST = 32
"""Words of a snippet; the rest of a longer one is cut off."""
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+|[!?.,;:]")
RARE = "<rare>"


@dataclass(frozen=True)
class Reviews:
    """x, texts as symbols [N, T], and y, their labels [N] (1 for liked), of three parts; and the symbols' names."""

    train: tuple[Tensor, Tensor]
    dev: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    words: tuple[str, ...]


def fetch(folder: Path) -> Path:
    """The archive in `folder`; pip fetches it if it is not there.

    Raises:
        DataError: pip cannot; the message says what pip said.
    """
    path = folder / ARCHIVE
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    asked = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    asked += ["--no-build-isolation", "--dest", str(folder), RELEASE]
    done = subprocess.run(asked, capture_output=True, text=True)
    if not path.exists():
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise DataError(f"pip cannot fetch {RELEASE} ({said}); put its source archive at {path} by hand")
    return path


def read(path: Path) -> list[tuple[float, str]]:
    """Scores and texts of all snippets, straight from the archive.

    Raises:
        DataError: it is not that archive.
    """
    with _archive(path):
        text = _member(_member(path.read_bytes(), INNER), SNIPPETS).decode("utf-8", errors="replace")
        rows = [line.split("\t", 2) for line in text.splitlines() if line.strip()]
        return [(float(score), snippet) for _, score, snippet in rows]


def lexicon(path: Path) -> dict[str, float]:
    """Words of sentiment and their ratings, from -4 to 4, of the same archive; DataError as `read`."""
    with _archive(path):
        text = _member(path.read_bytes(), LEXICON).decode("utf-8", errors="replace")
        rows = [line.split("\t") for line in text.splitlines() if line.strip()]
        return {row[0]: float(row[1]) for row in rows}


@contextmanager
def _archive(path: Path) -> Iterator[None]:
    """Inside, what is wrong with the archive is a DataError."""
    try:
        yield
    except (OSError, tarfile.TarError, EOFError, KeyError, ValueError, IndexError) as error:
        raise DataError(
            f"{path} is not the source archive of {RELEASE}: {error}; delete it, and it is fetched"
        ) from error


def _member(archive: bytes, name: str) -> bytes:
    """One file of an archive in memory; nothing is written anywhere."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        about = tar.getmember(name)
        file = tar.extractfile(about) if about.isfile() and about.size <= LARGEST else None
        if file is None:
            raise ValueError(f"{name} is no file of at most {LARGEST} bytes")
        return file.read()


def prepare(
    snippets: list[tuple[float, str]], dev: int = 1_000, test: int = 2_000, least: int = 3, seed: int = 0
) -> Reviews:
    """Parts drawn from a seed, and the words that the training part has at least so often; others are `RARE`."""
    clear = [(int(score > 0), WORD.findall(text.lower())[:LONGEST]) for score, text in snippets if abs(score) >= CLEAR]
    rows = [(label, words) for label, words in clear if words]
    random.Random(seed).shuffle(rows)
    parts = rows[test + dev :], rows[test : test + dev], rows[:test]
    counts = Counter(word for _, words in parts[0] for word in words)
    known = (RARE, *sorted(word for word, count in counts.items() if count >= least))
    numbers = {word: number for number, word in enumerate(known)}
    made = []
    for part in parts:
        texts = pad([[numbers.get(word, 0) for word in words] for _, words in part])
        made.append((texts, torch.tensor([label for label, _ in part])))
    return Reviews(made[0], made[1], made[2], known)
