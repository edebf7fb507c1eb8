# SPDX-License-Identifier: Apache-2.0
"""What the workers say of paceline, counted for the summary instead of shown, and the program's last figures."""

from __future__ import annotations

import re
from collections import Counter

OURS, WARNING, AT_ONCE = "paceline: ", "warning: ", ("auto: ", "few blocks: ")
"""In front of paceline's own lines of stderr, of its warnings, and of what is shown when it is said."""
_OWN_NUMBERS = re.compile(r" \[rank \d+ of \d+ on \S+\]")
_HELD_OUT = re.compile(r"(?i)(?<![a-z])(val|valid|validation|test|eval|held.out|dev)(?![a-rt-z]).*\d")
_LOSS = re.compile(r"(?i)loss\W+(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan)\b")


class Messages:
    """What is kept of the workers' output for the summary.

    Attributes:
        loss: that the program has printed last; "" if none.
        held_out: the last line of the program with a number of held-out data; "" if none.
        choices: of a rule, which `auto` made.
    """

    def __init__(self) -> None:
        self.loss, self.held_out, self.choices = "", "", 0
        self._warnings: dict[str, str] = {}  # what it is about -> the latest text
        self._times: dict[str, Counter[int]] = {}  # text -> by rank

    @property
    def warnings(self) -> list[str]:
        """Of paceline, each once, with how often a worker repeated it."""
        times = {text: max(self._times[text].values()) for text in self._warnings.values()}
        return [f"{text} ({count} times)" if count > 1 else text for text, count in times.items()]

    def shown(self, rank: int, line: str, is_error: bool) -> str:
        """The line as it is shown; "" if it is only for the log."""
        if is_error and line.startswith(OURS):
            text = line.removeprefix(OURS)
            if (bare := _OWN_NUMBERS.sub("", text.removeprefix(WARNING))).startswith(AT_ONCE):
                self.choices += "To repeat: " in bare
                return bare
            if text.startswith(WARNING):
                self._warnings[bare.partition(" was rejected ")[0]] = bare
                self._times.setdefault(bare, Counter())[rank] += 1
            return ""
        if rank == 0 and (found := _LOSS.findall(line)):
            self.loss = found[-1]
        if rank == 0 and _HELD_OUT.search(line):
            self.held_out = line.strip()
        return line
