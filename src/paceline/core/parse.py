# SPDX-License-Identifier: Apache-2.0
"""Parses rules and codecs written as literal calls; nothing is evaluated."""

from __future__ import annotations

import ast
import difflib
from typing import Any

from paceline.errors import RuleError


def read_call(text: str, what: str, example: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of `name`, `name()` or `name(setting=1, other="word")`.

    Args:
        text: the text.
        what: its kind, for messages: "rule", "codec".
        example: an example of the kind, for messages.
    """
    unreadable = f"cannot read the {what} {text!r}; write it like {example}"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RuleError(unreadable) from error
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise RuleError(unreadable)
    unnamed = [*tree.args, *(keyword.value for keyword in tree.keywords if keyword.arg is None)]
    if unnamed:
        shown = ", ".join(ast.unparse(one) for one in unnamed)
        raise RuleError(
            f"the settings of {text!r} need names, like {example}; name the setting that {shown} is for, or "
            "leave it out"
        )
    settings: dict[str, Any] = {}
    for keyword in tree.keywords:
        try:
            settings[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            raise RuleError(
                f"the value of {keyword.arg} in {text!r} is not a plain number, word in quotes, True, False or None"
            ) from error
    return tree.func.id, settings


def like(word: str, words: list[str]) -> str:
    """A suggestion of the closest word, for messages; "" if none is close."""
    close = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
