# SPDX-License-Identifier: Apache-2.0
"""Kaldi's binary matrices and vectors, wherever they stand in a file: nnet1, nnet2 and nnet3 models, archives.

Source: kaldi-matrix.cc, kaldi-vector.cc and packed-matrix.cc of https://github.com/kaldi-asr/kaldi. An object begins
with a token and a space (F is float32, D float64; little endian)::

    FM DM   "\\4" rows:int32 "\\4" columns:int32, numbers [rows, columns]
    FV DV   "\\4" length:int32, numbers [length]
    FP DP   "\\4" rows:int32, numbers [rows (rows + 1) / 2], the lower triangle

Everything between them (tokens, counts, learning rates, compressed matrices) stays as it is. The search goes on behind
the numbers of each object, so that numbers are never taken for a token.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from paceline.errors import DataError
from paceline_plugins.files.formats import spans
from paceline_plugins.files.formats.model_file import Format, ModelFile
from paceline_plugins.files.formats.spans import Span

BINARY = b"\0B"
_OBJECT = re.compile(rb"([FD])([MVP]) \x04", re.DOTALL)
_TOKEN, _KEY = re.compile(rb"<[A-Za-z0-9_]+>"), re.compile(rb"[^\s\0]+")
_TYPES = {b"F": spans.DTYPES["f32"], b"D": spans.DTYPES["f64"]}
_CONTAINERS = (b"Nnet", b"Nnet3", b"TransitionModel")


class Kaldi(Format):
    """A binary file of Kaldi."""

    name = "kaldi"

    def read(self, data: bytes, keep: Collection[str] = ()) -> ModelFile:
        """See :class:`Format`."""
        found = _spans(data)
        check_closed(spans.cut(data, found).skeleton)
        return spans.cut(data, found, keep)

    def write(self, model: ModelFile) -> bytes:
        """See :class:`Format`."""
        return spans.joined(model)


def looks_like(data: bytes) -> bool:
    """Whether a binary object of Kaldi begins the file, or follows a key."""
    at = data.find(BINARY, 0, 4096)
    return at >= 0 and (at == 0 or data[at - 1 : at] == b" ")


def check_closed(rest: bytes) -> None:
    """Refuse a model whose closing token is missing, in the bytes between its numbers."""
    for name in _CONTAINERS:
        if rest.count(b"<%s>" % name) > rest.count(b"</%s>" % name):
            raise DataError(f"<{name.decode()}> has no </{name.decode()}>: is it truncated?")


def _spans(data: bytes) -> list[Span]:
    found, position = list[Span](), 0
    names: list[str] = []
    while match := _OBJECT.search(data, position):
        what, shape, start = _object(data, match, len(found))
        names.append(name_after(data[position : match.start()], len(found) + 1))
        span = Span(names[-1], _TYPES[match[1]], shape, start)
        if span.stop > len(data):
            raise DataError(
                f"{what} number {len(found) + 1} ({names[-1]}) of shape {shape} would end at byte {span.stop:,}, and "
                f"there are {len(data):,}: is it truncated?"
            )
        found.append(span)
        position = span.stop
    pairs = zip(spans.unique(names), found, strict=True)
    return [Span(name, one.dtype, one.shape, one.start) for name, one in pairs]


def _object(data: bytes, match: re.Match[bytes], number: int) -> tuple[str, tuple[int, ...], int]:
    """Kind, shape and first byte of the numbers of an object."""
    at = match.end()
    what = {b"M": "matrix", b"V": "vector", b"P": "packed matrix"}[match[2]]
    size = int.from_bytes(data[at : at + 4], "little", signed=True)
    shape: tuple[int, ...] = (size,) if match[2] == b"V" else (size * (size + 1) // 2,)
    start = at + 4
    if match[2] == b"M":
        if data[at + 4 : at + 5] != b"\x04":
            raise DataError(f"{what} number {number + 1} at byte {match.start():,} has one size only: is it truncated?")
        shape, start = (size, int.from_bytes(data[at + 5 : at + 9], "little", signed=True)), at + 9
    if min(size, *shape) < 0:
        raise DataError(f"{what} number {number + 1} at byte {match.start():,} has the shape {shape}")
    return what, shape, start


def name_after(before: bytes, number: int) -> str:
    """The last token before an object, such as `<LinearParams>`; in an archive its key."""
    words = _TOKEN.findall(before) or _KEY.findall(before.removesuffix(BINARY))
    return words[-1].decode(errors="replace") if words else f"object {number}"
