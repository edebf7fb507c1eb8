# SPDX-License-Identifier: Apache-2.0
"""Words in many languages, and files that are long, damaged or packed."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import pytest

from paceline import DataError
from paceline_lightrnn import text as module
from paceline_lightrnn.text import Text, tokenizer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop, 3rd!", ["Don", "'", "t", "stop", ",", "3rd", "!"]),
        ("Straße über Ægir", ["Straße", "über", "Ægir"]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),  # vowel signs are marks, which Python's \w leaves out
        ("Привет, мир", ["Привет", ",", "мир"]),
        ("我爱你 Python3", ["我", "爱", "你", "Python3"]),
        ("カタカナと漢字", list("カタカナと漢字")),
        ("한국어 문장", ["한국어", "문장"]),
        ("می‌خواهم", ["می‌خواهم"]),  # joined by a zero-width non-joiner
        ("x_1 = a[0]", ["x", "_", "1", "=", "a", "[", "0", "]"]),
        ("\U0001f600\U0001f600", ["\U0001f600", "\U0001f600"]),
        ("\u00a0 \t\u3000", []),
    ],
)
def test_words_of_many_languages(text: str, words: list[str]) -> None:
    assert tokenizer()(text) == words


def test_two_spellings_of_one_word_are_one() -> None:
    assert tokenizer()("caf\u00e9 cafe\u0301") == ["café", "café"]


def test_lower_case_and_text_that_is_cut_already() -> None:
    assert tokenizer(lower=True)("ÄPFEL Birne") == ["äpfel", "birne"]
    assert tokenizer("space")("it 's a_b <unk>") == ["it", "'s", "a_b", "<unk>"]
    with pytest.raises(DataError, match="unicode, space"):
        tokenizer("bytes")


def lines(*places: Path, **settings: str) -> list[tuple[list[str], bool]]:
    return list(Text(places, **settings))


def test_files_folders_and_packed_ones_in_order(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "b.txt").write_text("two\n")
    (tmp_path / "folder" / "deep" / "c.txt").write_text("three")
    (tmp_path / "folder" / ".hidden").write_text("no")
    (tmp_path / "folder" / "a.txt.gz").write_bytes(gzip.compress(b"one\n\nagain\n"))
    one = tmp_path / "z.txt"
    one.write_text("zero\n")
    found = lines(one, tmp_path / "folder")
    assert found == [(["zero"], True), (["one"], True), (["again"], True), (["two"], True), (["three"], True)]


def test_wrong_bytes_are_replaced_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfgood \xff bad\xfe\n" + "real \ufffd\n".encode() + b"cut \xe2\x82")
    text = Text([path])
    assert [words for words, _ in text] == [["good", "\ufffd", "bad", "\ufffd"], ["real", "\ufffd"], ["cut", "\ufffd"]]
    assert text.damaged == 3 and text.read == path.stat().st_size
    list(text)
    assert text.damaged == 3  # counted anew in each pass


def test_a_long_line_comes_in_pieces_and_no_word_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 16)
    path = tmp_path / "a.txt"
    words = [f"wört{number}" for number in range(50)]
    path.write_text(" ".join(words) + "\nshort\n" + "x" * 40)
    found = lines(path)
    assert [word for part, _ in found for word in part][:51] == [*words, "short"]
    assert sum(ended for _, ended in found) == 3 and found[-1][1]
    assert "".join(word for part, _ in found for word in part).endswith("short" + "x" * 40)


def test_a_long_line_does_not_come_into_memory_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1 << 14)
    path = tmp_path / "a.txt"
    path.write_text("word " * 400_000)
    tracemalloc.start()
    number = sum(len(words) for words, _ in Text([path], "space"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert number == 400_000 and peak < 1_000_000 < path.stat().st_size


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.txt does not exist"):
        Text([tmp_path / "missing.txt"])
    with pytest.raises(DataError, match="no file in the folder"):
        Text([tmp_path])
    with pytest.raises(DataError, match="no text was named"):
        Text([])
    wide = tmp_path / "wide.txt"
    wide.write_text("hello", encoding="utf-16")
    with pytest.raises(DataError, match=r"wide.txt is UTF-16.*iconv"):
        list(Text([wide]))
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(b"word " * 1000)[:-20])
    with pytest.raises(DataError, match=r"cannot read the text .*torn.gz"):
        list(Text([torn]))
