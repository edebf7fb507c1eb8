# SPDX-License-Identifier: Apache-2.0
"""One invocation of the tool: its output is passed on line by line, and its loss is read from it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from paceline.communication import schedulers
from paceline.errors import DataError
from paceline.observe.printable import plain

NOT_STARTED = 127
"""Exit code of a starter that could not execute the tool, as a shell says it."""


def invoke(command: Sequence[str], starter: Sequence[str], environment: Mapping[str, str], loss: str | None) -> float:
    """Run the tool to its end.

    Args:
        command: of the tool.
        starter: see `Plan`.
        environment: of the tool.
        loss: pattern of the loss, or None.

    Returns:
        The last loss that it printed; nan without a pattern.

    Raises:
        DataError: the tool failed, or printed no loss; the message has its last line.
    """
    whole = [*starter, str(os.getpid()), *command] if starter else list(command)
    pattern, last, found = re.compile(loss) if loss else None, "", float("nan")
    with subprocess.Popen(
        whole, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        seen = False
        for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            print(line, flush=True)
            last = plain(line).strip() or last
            if pattern is not None and (match := _last(pattern, line)):
                found, seen = _number(match, loss or ""), True
        code = process.wait()
    if code:
        raise DataError(f"{shlex.join(command)} {_ended(code)}; {_last_line(last)}")
    if pattern is not None and not seen:
        raise DataError(
            f"{shlex.join(command)} printed no line in which --loss {loss!r} finds a number; {_last_line(last)}"
        )
    return found


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """A tool's environment: that of this process, without what would make it think that it is one of several."""
    return {name: value for name, value in schedulers.alone(variables).items() if not name.startswith("PACELINE_")}


def _last(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
    return deque(pattern.finditer(line), maxlen=1).pop() if pattern.search(line) else None


def _number(match: re.Match[str], loss: str) -> float:
    text = match[1] if match.re.groups else match[0]
    try:
        return float(text)
    except (TypeError, ValueError):
        raise DataError(f"--loss {loss!r} finds {text!r} in the tool's output, which is no number") from None


def _ended(code: int) -> str:
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name} ({-code})"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}{' (was it found?)' if code == NOT_STARTED else ''}"


def _last_line(line: str) -> str:
    return f"its last line was {line!r}" if line else "it printed nothing"


def say(text: str) -> None:
    """A line of paceline's own, apart from the tool's output."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)
