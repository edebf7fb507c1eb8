# SPDX-License-Identifier: Apache-2.0
"""Codecs by name, and as a person writes them on a command line: a literal call that is never evaluated."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from typing import Any

from paceline.codec.base import Codec
from paceline.codec.dense import Dense
from paceline.codec.e3m0 import E3M0
from paceline.codec.half import Half
from paceline.codec.int8 import Int8
from paceline.codec.low_rank import LowRank
from paceline.codec.one_bit import OneBit
from paceline.codec.sign import Sign
from paceline.codec.top_k import TopK
from paceline.errors import RuleError


def _bf16(feedback: bool = True) -> Half:
    return Half("bf16", feedback)


def _fp16(feedback: bool = True) -> Half:
    return Half("fp16", feedback)


CODECS: dict[str, Callable[..., Codec]] = {
    "dense": Dense,
    "bf16": _bf16,
    "fp16": _fp16,
    "int8": Int8,
    "e3m0": E3M0,
    "one_bit": OneBit,
    "sign": Sign,
    "low_rank": LowRank,
    "top_k": TopK,
}
"""What builds the codec of each name."""


def codec_from_text(text: str) -> Codec:
    """Read `one_bit`, `one_bit()` or `low_rank(rank=2, feedback=False)`; nothing in it is ever evaluated."""
    name, settings = _call(text)
    if name not in CODECS:
        raise RuleError(f"there is no codec {name!r}; there are {', '.join(CODECS)}{_like(name, list(CODECS))}")
    known = list(inspect.signature(CODECS[name]).parameters)
    for setting in settings:
        if setting not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise RuleError(f"{name} has no setting {setting!r}; {has}{_like(setting, known)}")
    return CODECS[name](**settings)


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the settings of a literal call."""
    unreadable = f"cannot read the codec {text!r}; write it like one_bit or low_rank(rank=2)"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise RuleError(unreadable) from error
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise RuleError(unreadable)
    if tree.args or any(keyword.arg is None for keyword in tree.keywords):
        raise RuleError(f"the settings of {text!r} need names, like {tree.func.id}(feedback=False)")
    settings = {}
    for keyword in tree.keywords:
        try:
            settings[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise RuleError(
                f"the value of {keyword.arg} in {text!r} is not a plain number, word in quotes, True, False or None"
            ) from error
    return tree.func.id, settings


def _like(word: str, words: list[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
