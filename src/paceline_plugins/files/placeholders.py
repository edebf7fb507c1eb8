# SPDX-License-Identifier: Apache-2.0
"""`{model}` and the like in the command of a tool.

Only a lower-case word in braces is a placeholder; other braces stay, and `{{word}}` is the text `{word}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from paceline.core.parse import like
from paceline.errors import UnsupportedError

KNOWN = {
    "model": "file of the model that the tool starts from",
    "model_out": "file that it has to write",
    "part": "which part of the data it trains on, from 0",
    "job": "the same from 1",
    "parts": "how many parts there are",
    "list": "file of this part's lines of --data",
    "lr": "the rate of this block",
    "epoch": "from 0",
    "block": "from 0, over all epochs",
    "rank": "of the worker, from 0",
    "workers": "how many there are",
    "local_rank": "of the worker within its machine, from 0",
    "seed": "a number of this block and part, for a tool that shuffles",
}
"""Placeholder -> what stands there."""
NEEDED = ("model", "model_out")
_PLACEHOLDER = re.compile(r"\{\{([a-z_]+)\}\}|\{([a-z_]+)\}")


def used(command: Sequence[str]) -> set[str]:
    """The placeholders in a command."""
    return {match[2] for word in command for match in _PLACEHOLDER.finditer(word) if match[2]}


def check(command: Sequence[str], data: bool, rate: bool) -> None:
    """Refuse a command that the options do not fit.

    Args:
        command: of the tool.
        data: whether `--data` is given.
        rate: whether `--lr` is given.

    Raises:
        UnsupportedError: a placeholder is unknown, missing, or without the option that fills it.
    """
    names = used(command)
    for name in sorted(names - KNOWN.keys()):
        raise UnsupportedError(
            f"there is no placeholder {{{name}}}{like(name, list(KNOWN))}; there are "
            f"{', '.join(f'{{{one}}}' for one in KNOWN)}; the text {{{name}}} itself is written {{{{{name}}}}}"
        )
    for name in NEEDED:
        if name not in names:
            raise UnsupportedError(f"the tool's command needs {{{name}}}: the {KNOWN[name]}")
    for name, given, option in (("list", data, "--data FILE"), ("lr", rate, "--lr RATE")):
        if (name in names) != given:
            need = f"needs {option}" if name in names else f"does not use {{{name}}}, and {option} is given"
            raise UnsupportedError(f"the tool's command {need}{'' if given else f' for {{{name}}}'}")
    if not names & {"part", "job", "list", "rank"}:
        raise UnsupportedError(
            "the tool's command has neither {part}, {job}, {list} nor {rank}: all workers would train on the same data"
        )


def filled(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The command with values in place of the placeholders."""

    def value(match: re.Match[str]) -> str:
        return f"{{{match[1]}}}" if match[1] else str(values[match[2]])

    return [_PLACEHOLDER.sub(value, word) for word in command]
