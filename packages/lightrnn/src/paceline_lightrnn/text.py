# SPDX-License-Identifier: Apache-2.0
"""Tokenizes text: files of any size, read as a stream, in any language.

A word is a run of letters, marks and digits as Unicode knows them. A Han, Hiragana or Katakana character, which is
written without spaces, is a word of its own, and so is every other character that is no space. Marks stay with their
letter, and zero-width joiners do not split a word. Text is normalised first (NFC): a word has one spelling.
"""

from __future__ import annotations

import codecs
import functools
import gzip
import io
import re
import sys
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from paceline import DataError

STDIN = Path("-")
"""The name that stands for standard input."""
PIECE = 1 << 20
"""Bytes read at a time: a longer line is cut at a space, or here if it has none."""
TOKENS = ("unicode", "space")
Line = tuple[list[str], bool]
"""Words, and whether the line ends with them."""

_ALONE = (
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303b\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U000323af"
)
_JOINERS = "\u200c\u200d"


@functools.cache
def _expression() -> re.Pattern[str]:
    """The pattern of a word. Python's own classes lack marks, which Hindi needs."""
    alone = re.compile(f"[{_ALONE}]")
    letters, marks = [], []
    for code in range(sys.maxunicode + 1):
        kind = unicodedata.category(chr(code))
        if kind[0] == "M":
            marks.append(code)
        elif kind[0] in "LN" and not alone.match(chr(code)):
            letters.append(code)
    word, mark = _ranges([*letters, *marks]), _ranges(marks)
    return re.compile(f"[{_ALONE}][{mark}]*|[{_ranges(letters)}][{word}{_JOINERS}]*|\\S[{mark}]*")


def _ranges(codes: list[int]) -> str:
    """The inside of a character class."""
    found: list[list[int]] = []
    for code in sorted(codes):
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return "".join(f"{re.escape(chr(a))}-{re.escape(chr(b))}" for a, b in found)


def tokenizer(tokens: str = "unicode", lower: bool = False) -> Callable[[str], list[str]]:
    """A function from text to words.

    Args:
        tokens: "unicode" as described above, or "space" for tokenized text: words between white space.
        lower: lowercase the text.
    """
    if tokens not in TOKENS:
        raise DataError(f"tokens is one of {', '.join(TOKENS)}; got {tokens!r}")
    if tokens == "space":
        return (lambda text: text.lower().split()) if lower else str.split
    find = _expression().findall
    if lower:
        return lambda text: find(unicodedata.normalize("NFC", text.lower()))
    return lambda text: find(unicodedata.normalize("NFC", text))


def find_files(places: Sequence[str | Path]) -> list[Path]:
    """The named files, and all files below named folders, sorted by name.

    Hidden files and folders below a named folder are skipped. Raises DataError if there is none.
    """
    found: list[Path] = []
    for place in map(Path, places):
        if place == STDIN or place.is_file():
            found.append(place)
        elif place.is_dir():
            below = (path for path in place.rglob("*") if path.is_file())
            inside = sorted(p for p in below if not any(part[0] == "." for part in p.relative_to(place).parts))
            if not inside:
                raise DataError(f"there is no file in the folder {place}; name a text file or a folder with some")
            found += inside
        else:
            raise DataError(f"the text {place} does not exist (looked in {Path.cwd()})")
    if not found:
        raise DataError("no text was named; give a file, several, a folder, or - for standard input")
    return found


class Text:
    """Words of files; each iteration reads from the beginning, standard input only once.

    Args:
        places: files (`.gz` is unpacked), folders, or `-`.
        tokens: as for `tokenizer`.
        lower: as for `tokenizer`.

    Attributes:
        files: the files, in reading order.
        damaged: bytes of the last pass that were not UTF-8; each run of them reads as U+FFFD.
        read: bytes that the pass has read so far.
    """

    def __init__(self, places: Iterable[str | Path], tokens: str = "unicode", lower: bool = False) -> None:
        self.files, self.tokens, self.lower = find_files(list(places)), tokens, lower
        self._cut = tokenizer(tokens, lower)
        self.damaged = self.read = 0

    def __iter__(self) -> Iterator[Line]:
        """Words line by line; lines without words are skipped."""
        self.damaged = self.read = 0
        for path in self.files:
            open_line = False  # a piece of this line was yielded, but not its end
            for text, ended in self._pieces(path):
                words = self._cut(text)
                if words or (ended and open_line):
                    yield words, ended
                    open_line = not ended

    def _pieces(self, path: Path) -> Iterator[tuple[str, bool]]:
        """Lines of a file, long ones in pieces; the last line ends with the file."""
        kept = ""
        for raw, text in self._decoded(path):
            text, ended = kept + text, raw.endswith(b"\n")
            kept = ""
            if not ended and len(raw) < PIECE:
                kept = text  # the end of the file
                continue
            cut = 0 if ended else max(text.rfind(" "), text.rfind("\t")) + 1
            if cut and len(text) - cut < PIECE:
                text, kept = text[:cut], text[cut:]
            yield text, ended
        yield kept, True

    def _decoded(self, path: Path) -> Iterator[tuple[bytes, str]]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        first = True
        try:
            with _opened(path) as file:
                while raw := file.readline(PIECE):
                    if first and raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                        raise DataError(f"{path} is UTF-16; write it as UTF-8 first, such as with iconv -t UTF-8")
                    text = decoder.decode(raw[3:] if first and raw.startswith(codecs.BOM_UTF8) else raw)
                    self._count(raw, text)
                    yield raw, text
                    first = False
                rest = decoder.decode(b"", final=True)
                self.damaged += len(rest)
                if rest:
                    yield b"", rest
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read the text {path}: {error}") from error

    def _count(self, raw: bytes, text: str) -> None:
        self.read += len(raw)
        if "\ufffd" in text:
            self.damaged += max(0, text.count("\ufffd") - raw.count("\ufffd".encode()))


def _opened(path: Path) -> io.BufferedIOBase:
    if path == STDIN:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
