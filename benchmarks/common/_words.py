# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine has: docstrings and comments of Python's library and of the packages beside it."""

from __future__ import annotations

import ast
import io
import random
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

SHORTEST = 20
"""Characters of a line that is taken; shorter ones are mostly parts of tables and lists."""
IDENTIFIER = re.compile(r"[^\W\d]\w*")
LEFT_OUT = ("test", "tests", "_vendor", "idlelib", "site-packages")


def sources() -> list[Path]:
    """Python files of the library and of the installed packages, without tests, in an order drawn once for all."""
    paths = sysconfig.get_paths()
    library, packages = Path(paths["stdlib"]), Path(paths["purelib"])
    found = [
        path
        for root in (library, packages)
        for path in sorted(root.rglob("*.py"))
        if not set(path.relative_to(root).parts) & set(LEFT_OUT)
    ]
    random.Random(0).shuffle(found)
    return found


def lines_of(path: Path) -> Iterator[str]:
    """Lines of its docstrings, then those of its comments."""
    try:
        text = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (OSError, ValueError, SyntaxError, tokenize.TokenError, RecursionError):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented):
            yield from (ast.get_docstring(node) or "").splitlines()
    yield from (one.string.lstrip("#") for one in tokens if one.type == tokenize.COMMENT)


def once(path: Path, make: Callable[[Path, int], int], words: int) -> None:
    """Let `write` or `write_code` make the file, unless it is there; one that was interrupted leaves none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        make(beside, words)
        beside.rename(path)


def write(path: Path, words: int) -> int:
    """Write lines with about so many words (by white space and punctuation) to `path`; how many lines.

    A line that was there before is left out: licences and parameters that come again and again teach nothing.
    """
    seen: set[str] = set()
    count = lines = 0
    with path.open("w", encoding="utf-8") as file:
        for source in sources():
            for line in map(str.strip, lines_of(source)):
                if len(line) < SHORTEST or line in seen:
                    continue
                seen.add(line)
                file.write(line + "\n")
                lines += 1
                count += _words(line) + 1
            if count >= words:
                break
    return lines


def _words(line: str) -> int:
    """About how many words the line is cut into."""
    inside, count = False, 0
    for character in line:
        word = character.isalnum()
        count += (word and not inside) or not (word or character.isspace())
        inside = word
    return count


def write_code(path: Path, words: int) -> int:
    """Write identifiers and words of whole Python sources, line by line, until there are so many; how many there are.

    A line's end counts as a word. A file that was there before is left out, tests stay.
    """
    paths = sysconfig.get_paths()
    found = sorted({one for root in ("stdlib", "purelib") for one in Path(paths[root]).rglob("*.py")})
    random.Random(0).shuffle(found)
    seen: set[str] = set()
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for source in found:
            try:
                text = source.read_text(encoding="utf-8")
            except (OSError, ValueError):
                continue
            if text in seen:
                continue
            seen.add(text)
            for line in filter(None, map(IDENTIFIER.findall, text.splitlines())):
                file.write(" ".join(line) + "\n")
                count += len(line) + 1
            if count >= words:
                break
    return count
