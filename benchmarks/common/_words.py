# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine has: docstrings and comments of Python's library."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path


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
