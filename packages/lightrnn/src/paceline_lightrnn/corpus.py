# SPDX-License-Identifier: Apache-2.0
"""A text as word numbers in a memory-mapped file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from paceline import DataError
from paceline_lightrnn import files
from paceline_lightrnn.state import PADDING
from paceline_lightrnn.text import STDIN, Text
from paceline_lightrnn.vocabulary import Vocabulary

FORMAT = "paceline corpus 1"
CHUNK = 1 << 20
Ids = NDArray[np.int32]


class Corpus:
    """Words of a text in order, int32, in memory or in a memory-mapped file.

    Args:
        ids: shape (n,), the numbers of the words.
        fingerprint: of the text and the vocabulary; empty if unknown.
        damaged: bytes of the text that were not UTF-8.
    """

    def __init__(self, ids: Ids, fingerprint: str = "", damaged: int = 0) -> None:
        self.ids, self.fingerprint, self.damaged = ids, fingerprint, damaged

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, begin: int, end: int) -> Corpus:
        """Words `begin` to `end` (exclusive), not copied."""
        return Corpus(self.ids[begin:end], self.fingerprint)

    def split(self, share: float) -> tuple[Corpus, Corpus]:
        """The text without its last part, and its last part, with `share` of the words."""
        if not 0 < share < 1:
            raise DataError(f"the last part of a text is a share between 0 and 1 of it, got {share}")
        last = max(1, round(share * len(self)))
        if last >= len(self):
            raise DataError(f"a text of {len(self)} words is too short to hold a part of it back; give more text")
        return self.part(0, len(self) - last), self.part(len(self) - last, len(self))

    @classmethod
    def write(
        cls, text: Text, vocabulary: Vocabulary, path: Path, progress: Callable[[int], None] | None = None
    ) -> Corpus:
        """Stream the text's numbers to `path`, with a description beside it; atomic."""
        key = fingerprint(text, vocabulary)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside, words = files.beside(path), 0
        with beside.open("wb") as file:
            for chunk in _chunks(text, vocabulary):
                chunk.tofile(file)
                words += len(chunk)
                if progress is not None:
                    progress(words)
        if not words:
            beside.unlink()
            raise DataError("there is no word in the text; is the file empty?")
        about = {"format": FORMAT, "words": words, "fingerprint": key, "damaged": text.damaged}
        _about(path).unlink(missing_ok=True)  # never leave an old description beside new ids
        os.replace(beside, path)
        files.write_text(_about(path), json.dumps(about) + "\n")
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path) -> Corpus:
        """Map what `write` wrote; DataError if it is missing or incomplete."""
        path = Path(path)
        try:
            about: dict[str, Any] = json.loads(_about(path).read_text(encoding="utf-8"))
            if about["format"] != FORMAT:
                raise DataError(f"{path} is no corpus: its format is {about['format']!r}")
            words, size = int(about["words"]), path.stat().st_size
            if size != 4 * words or not words:
                raise DataError(
                    f"the corpus {path} is damaged: {size} bytes for {words} words; remove it to have it remade"
                )
            ids: Ids = np.memmap(path, np.dtype("<i4"), "r")
            return cls(ids, str(about["fingerprint"]), int(about["damaged"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"cannot read the corpus {path}: {error}; remove it, and it is made again") from error

    @classmethod
    def ensure(
        cls, text: Text, vocabulary: Vocabulary, path: Path, progress: Callable[[int], None] | None = None
    ) -> Corpus:
        """The corpus at `path` if it is of this text and this vocabulary, else a new one."""
        with contextlib.suppress(DataError):
            found = cls.open(path)
            if found.fingerprint == fingerprint(text, vocabulary):
                return found
        return cls.write(text, vocabulary, path, progress)


def fingerprint(text: Text, vocabulary: Vocabulary) -> str:
    """A hash of the files (name, size, modification time) and the vocabulary; random for standard input."""
    rows: list[Any] = [FORMAT, vocabulary.fingerprint]
    for path in text.files:
        if path == STDIN:
            rows.append(os.urandom(16).hex())
        else:
            state = path.stat()
            rows.append([str(path.resolve()), state.st_size, state.st_mtime_ns])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _chunks(text: Text, vocabulary: Vocabulary) -> Iterator[Ids]:
    held = array("i")
    for words, ended in text:
        held.extend(vocabulary.ids(words, ended))
        if len(held) >= CHUNK:
            yield np.array(held, np.dtype("<i4"))
            held = array("i")
    if held:
        yield np.array(held, np.dtype("<i4"))


def _about(path: Path) -> Path:
    return path.with_name(path.name + ".json")


class Passages(Dataset[Tensor]):
    """A corpus as passages of consecutive words, for a `DataLoader` and `run.share`.

    Each begins from the zero state and the end of a line; within it the state is carried from window to window. The
    last one is padded with `PADDING`, and passages of padding follow until the number is a multiple of `multiple`:
    workers then make the same number of steps in every epoch, and may communicate between epochs.

    Args:
        corpus: the words.
        length: of a passage, words.
        multiple: the number of passages is a multiple of it.
    """

    def __init__(self, corpus: Corpus, length: int, multiple: int = 1) -> None:
        if length < 1 or multiple < 1:
            raise DataError(f"passages have a length and a multiple of at least 1, got {length} and {multiple}")
        if not len(corpus):
            raise DataError("the corpus has no words, so that there is no passage to train on")
        self.corpus, self.length = corpus, length
        self._number = math.ceil(math.ceil(len(corpus) / length) / multiple) * multiple

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, number: int) -> Tensor:
        """Shape (length,), int64."""
        if not 0 <= number < self._number:
            raise IndexError(f"passages are 0 to {self._number - 1}, got {number}")
        words = torch.full((self.length,), PADDING, dtype=torch.int64)
        found = self.corpus.ids[number * self.length : (number + 1) * self.length]
        words[: len(found)] = torch.from_numpy(found.astype(np.int64))
        return words


class Parts(Dataset[Tensor]):
    """Parts of a corpus as passages; one part at a time is the data set, and all have the same number of passages.

    Args:
        corpus: the words.
        parts: number of parts.
        share: of the corpus, for each part.
        length: of a passage, words.
        multiple: see `Passages`.

    Attributes:
        part: the current one, from 0.
    """

    def __init__(self, corpus: Corpus, parts: int, share: float, length: int, multiple: int) -> None:
        size = max(1, int(share * len(corpus)))
        self.all = corpus.part(0, min(size * parts, len(corpus)))
        self._passages = [
            Passages(corpus.part(k * size, min((k + 1) * size, len(corpus))), length, multiple) for k in range(parts)
        ]
        self.part = 0

    def __len__(self) -> int:
        return len(self._passages[self.part])

    def __getitem__(self, number: int) -> Tensor:
        """Shape (length,), int64."""
        return self._passages[self.part][number]


def lanes(corpus: Corpus, number: int, window: int, part: tuple[int, int] = (0, 1)) -> Iterator[Tensor]:
    """The corpus cut into `number` consecutive lanes that are read in parallel, window by window.

    Args:
        corpus: the words.
        number: of lanes; the last ones are padded with `PADDING`.
        window: words of each lane at a time.
        part: (k, n): only lanes k, k + n, k + 2n, ..

    Yields:
        Shape (lanes, up to `window`), int64.
    """
    length = -(-len(corpus) // number)
    begins = np.arange(part[0], number, part[1], dtype=np.int64) * length
    for offset in range(0, length if len(begins) else 0, window):
        places = begins[:, None] + np.arange(offset, min(offset + window, length))
        words = corpus.ids[np.minimum(places, len(corpus) - 1)].astype(np.int64)
        words[places >= len(corpus)] = PADDING
        yield torch.from_numpy(words)
