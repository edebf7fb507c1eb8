# SPDX-License-Identifier: Apache-2.0
"""Words and their numbers."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline import CheckpointError, DataError, MismatchError
from paceline_lightrnn import files
from paceline_lightrnn.text import Line

FORMAT = "paceline vocabulary 1"
END, UNKNOWN = "</s>", "<unk>"
LIMIT = 20_000_000
"""Most different words in the counter; a word and its count take about 150 bytes."""


class Vocabulary:
    """Words by number: 0 is the end of a line, 1 is every unknown word, the rest go by frequency.

    Args:
        words: the words; the first two are `</s>` and `<unk>`.
        counts: of each in the counted text.
        tokens: how the text was tokenized.
        lower: whether it was lowercased.
        lost: most occurrences by which a word may be undercounted, or missing.

    Raises:
        MismatchError: a word is repeated or contains white space, or the first two are others.
    """

    end, unknown = 0, 1

    def __init__(
        self,
        words: Sequence[str],
        counts: Iterable[int],
        *,
        tokens: str = "unicode",
        lower: bool = False,
        lost: int = 0,
    ) -> None:
        self.words = list(words)
        self.counts: NDArray[np.int64] = np.fromiter(counts, np.int64)
        self.tokens, self.lower, self.lost = tokens, lower, lost
        if self.words[:2] != [END, UNKNOWN]:
            raise MismatchError(f"the first two words of a vocabulary are {END} and {UNKNOWN}; got {self.words[:2]}")
        if len(self.counts) != len(self.words):
            raise MismatchError(f"{len(self.words)} words have {len(self.counts)} counts; each word needs one")
        blank = next((word for word in self.words if len(word.split()) != 1), None)
        if blank is not None:
            raise MismatchError(f"a word has no white space in it and is not empty; got {blank!r}")
        self._ids = {word: number for number, word in enumerate(self.words)}
        if len(self._ids) != len(self.words):
            twice = next(word for word, times in Counter(self.words).items() if times > 1)
            raise MismatchError(f"the word {twice!r} comes twice in the vocabulary; leave one of them out")

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, word: str) -> int:
        """The number of a word; that of `<unk>` if it is unknown."""
        return self._ids.get(word, self.unknown)

    def __contains__(self, word: str) -> bool:
        return word in self._ids

    @property
    def fingerprint(self) -> str:
        """A hash, equal for vocabularies that give every text the same numbers."""
        about = f"{self.tokens} {self.lower}\n"
        return hashlib.sha256((about + "\n".join(self.words)).encode()).hexdigest()

    def ids(self, words: Iterable[str], ended: bool = True) -> list[int]:
        """Numbers of the words of a line, and of its end if `ended`."""
        get, unknown = self._ids.get, self.unknown
        found = [get(word, unknown) for word in words]
        if ended:
            found.append(self.end)
        return found

    def text(self, ids: Iterable[int]) -> str:
        """Words separated by spaces, with a line break at the end of a line."""
        return " ".join("\n" if number == self.end else self.words[number] for number in ids).replace(" \n ", "\n")

    # -- counted in a text ------------------------------------------------------------------------

    @classmethod
    def count(
        cls,
        lines: Iterable[Line],
        *,
        most: int | None = None,
        min_count: int = 1,
        limit: int = LIMIT,
        tokens: str = "unicode",
        lower: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Vocabulary:
        """The words of a text, in one pass and bounded memory.

        As in word2vec, whenever the counter has more than `limit` words, those seen once are dropped, then those seen
        up to twice, and so on. A frequent word loses a few of its first counts; `lost` bounds how many.

        Args:
            lines: a `Text`.
            most: size of the vocabulary, including `</s>` and `<unk>`; the most frequent words stay.
            min_count: rarer words are left out.
            limit: most different words in the counter.
            tokens: how the text was tokenized, for the record.
            lower: likewise.
            progress: called with the number of words so far, now and then.

        Raises:
            DataError: there is no word in the text, or `most` has no room for one.
        """
        if most is not None and most < 3:
            raise DataError(f"a vocabulary has {END}, {UNKNOWN} and at least one word; got room for {most}")
        counts: Counter[str] = Counter()
        ends = seen = lost = told = 0
        for words, ended in lines:
            counts.update(words)
            ends, seen = ends + ended, seen + len(words)
            if len(counts) > limit:
                lost = _prune(counts, limit, lost)
            if progress is not None and seen - told >= 200_000:
                told = seen
                progress(seen)
        ended_as_word = counts.pop(END, 0)  # tokenized text may contain it, and <unk>, literally
        counts.pop(UNKNOWN, 0)
        if not counts:
            raise DataError("there is no word in the text; is the file empty?")
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        kept = [item for item in ranked[: None if most is None else most - 2] if item[1] >= min_count]
        if not kept:
            raise DataError(f"no word comes {min_count} times (the most frequent {ranked[0][1]}); lower min_count")
        unknown = seen - ended_as_word - sum(number for _, number in kept)
        every = [(END, ends + ended_as_word), (UNKNOWN, unknown), *kept]
        return cls([w for w, _ in every], (n for _, n in every), tokens=tokens, lower=lower, lost=lost)

    # -- on disk ----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write it to a file, atomically: a line of JSON, then a word and its count a line."""
        path = Path(path)
        body = "".join(f"{word}\t{count}\n" for word, count in zip(self.words, self.counts.tolist(), strict=True))
        about = {
            "format": FORMAT,
            "words": len(self),
            "tokens": self.tokens,
            "lower": self.lower,
            "lost": self.lost,
            "sha256": hashlib.sha256(body.encode()).hexdigest(),
        }
        files.write_text(Path(path), json.dumps(about) + "\n" + body)

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read what `save` wrote; CheckpointError for anything else, or a changed file."""
        try:
            head, _, body = Path(path).read_bytes().partition(b"\n")
            about = json.loads(head)
            if about["format"] != FORMAT:
                raise CheckpointError(f"{path} is no vocabulary: its format is {about['format']!r}")
            if hashlib.sha256(body).hexdigest() != about["sha256"]:
                raise CheckpointError(f"the vocabulary {path} is damaged: it is not what was saved; save it again")
            rows = [row.rsplit("\t", 1) for row in body.decode().split("\n")[:-1]]
            words, counts = [row[0] for row in rows], [int(row[1]) for row in rows]
            return cls(words, counts, tokens=about["tokens"], lower=about["lower"], lost=about["lost"])
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, IndexError, MismatchError) as error:
            raise CheckpointError(f"cannot read the vocabulary {path}: {error}; save it again") from error


def _prune(counts: Counter[str], limit: int, lost: int) -> int:
    """Drop the rarest words until there is room; returns the most occurrences of a dropped word."""
    least = 0
    while len(counts) > limit // 2:
        least += 1
        for word in [word for word, number in counts.items() if number <= least]:
            del counts[word]
    return lost + least
