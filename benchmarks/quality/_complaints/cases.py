# SPDX-License-Identifier: Apache-2.0
"""What a small program is, how it becomes a file, and what has to hold of what its workers print."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELPERS = Path(__file__).with_name("helpers.py")
BOTH = ("sync", "bmuf(period=3)")
EVERY = (*BOTH, "asgd")


@dataclass
class Seen:
    """What the workers noted under a rule, and what one process noted that does the whole job."""

    rule: str
    workers: list[dict[str, Any]]
    alone: dict[str, Any]


Check = Callable[[Seen], str]
"""What is wrong; empty where nothing is."""


@dataclass(frozen=True)
class Case:
    """A small program after a public complaint.

    Attributes:
        name: of its function.
        complaint: project and number.
        kind: its module.
        about: what is complained about.
        source: the whole script.
        checks: what has to hold.
        rules: it is run under each of them.
        workers: how many.
        whole: the reference of `sync` takes the batches of all workers at once; else that of one worker.
        said: a pattern of what paceline may say where the checks do not hold.
        page: words of `docs/guide/limits.md` that name the difference where no run can see it.
        code: the exit code that the program itself has.
        fails: several workers must end with another one than 0.
        limit_s: after which the run counts as stuck.
    """

    name: str
    complaint: str
    kind: str
    about: str
    source: str
    checks: tuple[Check, ...]
    rules: tuple[str, ...] = ("sync",)
    workers: int = 2
    whole: bool = True
    said: str = ""
    page: str = ""
    code: int = 0
    fails: bool = False
    limit_s: float = 300.0


CASES: list[Case] = []


def case(complaint: str, *checks: Check, **more: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register the body of a function as a script; its docstring says what is complained about."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        kind, about = function.__module__.rpartition(".")[2], str(function.__doc__)
        CASES.append(Case(function.__name__, complaint, kind, about, script(function), checks, **more))
        return function

    return register


def script(function: Callable[[], None]) -> str:
    """The helpers, what the module imports, and the body of the function at the top level."""
    text = inspect.getsource(function)
    body = ast.parse(text).body[0]
    assert isinstance(body, ast.FunctionDef)
    lines = text.splitlines()[body.body[1].lineno - 1 :]
    module = ast.parse(Path(inspect.getfile(function)).read_text(encoding="utf-8"))
    imports = [ast.unparse(node) for node in module.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    imports = [line for line in imports if "_complaints" not in line and "__future__" not in line]
    return "\n".join([HELPERS.read_text(encoding="utf-8"), *imports, textwrap.dedent("\n".join(lines)), ""])


# -- what has to hold -------------------------------------------------------------------------------------------------


def far(a: Any, b: Any, tolerance: float) -> str:
    """How far two values are apart, in words; empty where they are not."""
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        if len(a) != len(b):
            return f"{len(a)} values and {len(b)}"
        return next(
            (f"{word} at {i}" for i, pair in enumerate(zip(a, b, strict=True)) if (word := far(*pair, tolerance))), ""
        )
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return "" if math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) else f"{a:.6g} and {b:.6g}"
    return "" if a == b else f"{a!r} and {b!r}"


def alike(*keys: str) -> Check:
    """All workers noted the same."""

    def check(seen: Seen) -> str:
        pairs = ((key, rank, worker) for rank, worker in enumerate(seen.workers) for key in keys)
        for key, rank, worker in pairs:
            if word := far(seen.workers[0].get(key, "nothing"), worker.get(key), 1e-6):
                return f"`{key}` of rank 0 and {rank}: {word}"
        return ""

    return check


def as_alone(*keys: str, tolerance: float = 1e-4) -> Check:
    """Each worker noted what one process notes that does the whole job."""

    def check(seen: Seen) -> str:
        pairs = ((key, rank, worker) for rank, worker in enumerate(seen.workers) for key in keys)
        for key, rank, worker in pairs:
            if word := far(seen.alone[key], worker.get(key), tolerance):
                return f"`{key}` alone and of rank {rank}: {word}"
        return ""

    return check


def right(*keys: str, tolerance: float = 1e-4) -> Check:
    """As alone under `sync`; else alike, with a held-out `loss` of at most 0.7 of that of the `start`."""

    def check(seen: Seen) -> str:
        if wrong := alike(*keys)(seen):
            return wrong
        if seen.rule.startswith("sync"):
            return as_alone(*keys, tolerance=tolerance)(seen)
        ends = [(w["start"], w["loss"]) for w in seen.workers]
        return next((f"the loss goes from {start:.4g} to {end:.4g}" for start, end in ends if end > 0.7 * start), "")

    return check


def once(key: str) -> Check:
    """All workers together have what one process has, each as often."""

    def check(seen: Seen) -> str:
        mine = Counter(map(str, (each for worker in seen.workers for each in worker.get(key, []))))
        should = Counter(map(str, seen.alone[key]))
        missing, more = should - mine, mine - should
        told = f"of {should.total()} `{key}` {missing.total()} missing, {more.total()} too many"
        return told if missing or more else ""

    return check


def distinct(key: str) -> Check:
    """No value comes twice, on one worker or on two."""

    def check(seen: Seen) -> str:
        values = [value for worker in seen.workers for value in worker.get(key, [])]
        return "" if len(set(values)) == len(values) > 0 else f"{len(set(values))} of {len(values)} `{key}` differ"

    return check


def that(holds: Callable[[dict[str, Any]], bool], what: str) -> Check:
    """Something that holds of each worker's notes."""
    return lambda seen: next((f"rank {r}: not {what}" for r, w in enumerate(seen.workers) if not w or not holds(w)), "")
