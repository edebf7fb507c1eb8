# SPDX-License-Identifier: Apache-2.0
"""Prepares text for training: a vocabulary and word numbers on disk, made once and reused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline import CheckpointError, DataError, PeerLostError
from paceline_lightrnn import files
from paceline_lightrnn.corpus import Corpus
from paceline_lightrnn.settings import Source
from paceline_lightrnn.text import STDIN, Text
from paceline_lightrnn.vocabulary import Vocabulary

VOCABULARY, CORPUS = "vocabulary.tsv", "corpus"
POLL_S = 0.1
Say = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """The data of a training.

    Attributes:
        vocabulary: the words.
        train: the text.
        validation: the held-out text.
    """

    vocabulary: Vocabulary
    train: Corpus
    validation: Corpus


def prepare(source: Source, folder: Path, *, fixed: bool = False, say: Say = lambda text: None) -> Data:
    """Write vocabulary and corpora into `folder`, or reuse those of the same text.

    Args:
        source: the text.
        folder: of the training.
        fixed: a training has begun with the present files, so that they must not change.
        say: called with progress messages.

    Raises:
        DataError: there is no such text, or no word in it.
        CheckpointError: `fixed`, and the text has changed.
    """
    text, validation = _texts(source)
    key = _key(source, text, validation)
    found = _there(source, folder, key)
    if found is not None:
        return found
    if fixed:
        raise CheckpointError(
            f"the text has changed since the training in {folder} began; give the same text to go on, or another "
            "folder to begin anew"
        )
    folder.mkdir(parents=True, exist_ok=True)
    say("counting words")
    vocabulary = Vocabulary.count(
        text,
        most=source.vocabulary,
        min_count=source.min_count,
        tokens=source.tokens,
        lower=source.lower,
        progress=lambda words: say(f"counting words: {words:,}"),
    )
    if text.damaged:
        say(f"{text.damaged:,} wrong bytes of the text were replaced: it is no clean UTF-8")
    if vocabulary.lost:
        say(f"rare words were dropped while counting: one that came {vocabulary.lost:,} times or less may be missing")
    if source.vocabulary is not None and len(vocabulary) < source.vocabulary and source.min_count <= 1:
        say(f"the text has fewer different words than the {source.vocabulary:,} that were asked for")
    vocabulary.save(folder / VOCABULARY)
    say(f"{len(vocabulary):,} words in the vocabulary; writing the text as numbers")
    Corpus.ensure(text, vocabulary, folder / CORPUS / "train", lambda words: say(f"writing numbers: {words:,}"))
    if validation is not None:
        Corpus.ensure(validation, vocabulary, folder / CORPUS / "validation")
    _write_key(folder, key)
    found = _there(source, folder, key)
    if found is None:
        raise DataError(
            f"what was written into {folder} cannot be read again; is the disk full, or do two runs share it?"
        )
    return found


def await_prepared(source: Source, folder: Path, timeout_s: float) -> Data:
    """Wait until worker 0 has prepared the shared folder, as long as its files grow.

    Raises:
        PeerLostError: no file has grown for `timeout_s` seconds.
    """
    key, seen, since = _key(source, *_texts(source)), -1, time.monotonic()
    while True:
        found = _there(source, folder, key)
        if found is not None:
            return found
        size = _size(folder)
        if size != seen:
            seen, since = size, time.monotonic()
        if time.monotonic() - since > timeout_s:
            raise PeerLostError(
                f"worker 0 has prepared no text in {folder} for {timeout_s:g} s; is it a folder that all workers share?"
            )
        time.sleep(POLL_S)


def is_prepared(folder: Path) -> bool:
    """Whether the folder has a prepared text."""
    return (folder / VOCABULARY).is_file() and (folder / CORPUS / "source.json").is_file()


def open_train(folder: Path) -> Corpus:
    """The text of a training, with its last part."""
    return Corpus.open(folder / CORPUS / "train")


def _texts(source: Source) -> tuple[Text, Text | None]:
    text = Text(source.texts, source.tokens, source.lower)
    validation = None if source.validation is None else Text([source.validation], source.tokens, source.lower)
    if STDIN in text.files or (validation is not None and STDIN in validation.files):
        raise DataError("a text is read twice to train on it, and standard input can be read once: write it to a file")
    return text, validation


def _key(source: Source, *texts: Text | None) -> str:
    """A hash of the files' states and the settings by which they are read."""
    files = [path for text in texts if text is not None for path in text.files]
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([asdict(source), states]).encode()).hexdigest()


def _there(source: Source, folder: Path, key: str) -> Data | None:
    """The data prepared from this text; None if there are none, or they are damaged."""
    validation: Corpus | None = None
    try:
        if (folder / CORPUS / "source.json").read_text(encoding="utf-8").strip() != key:
            return None
        vocabulary, whole = Vocabulary.load(folder / VOCABULARY), open_train(folder)
        if source.validation is not None:
            validation = Corpus.open(folder / CORPUS / "validation")
    except (DataError, CheckpointError, OSError):
        return None
    return Data(vocabulary, whole, validation) if validation else Data(vocabulary, *whole.split(source.held_back))


def _size(folder: Path) -> int:
    """Bytes in a folder that may change meanwhile."""
    found = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            found += path.stat().st_size if path.is_file() else 0
    return found


def _write_key(folder: Path, key: str) -> None:
    path = folder / CORPUS / "source.json"
    files.write_text(path, key + "\n")
