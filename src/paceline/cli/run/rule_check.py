# SPDX-License-Identifier: Apache-2.0
"""Checks a rule before anything starts, without the seconds in which torch loads.

A forked child builds the rule with a stand-in for torch: a rule is numbers and names, and uses torch when it trains.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from functools import partial
from types import ModuleType
from typing import Any

from paceline.errors import PacelineError


def checked(text: str, elastic: bool) -> tuple[str, bool]:
    """What is wrong with a rule, "" if nothing, and whether its workers open connections of their own."""
    if "torch" in sys.modules or ":" in text:  # a rule of a module's own
        return _built(text, elastic)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException), os.fdopen(writer, "w") as file:
            sys.modules.update(dict.fromkeys(("torch", "torch.nn", "torch.optim", "torch.utils"), _stand_in()))
            json.dump(_built(text, elastic), file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return tuple(json.loads(answer)) if answer else _built(text, elastic)


def _built(text: str, elastic: bool) -> tuple[str, bool]:
    from paceline.rules import recipes

    try:
        rule = recipes.make_rule(text, {})
        rule.check_growth(elastic)
    except PacelineError as error:
        return str(error), False
    return "", rule.schedule.opens_connections


class _Anything(type):
    """A class whose attributes are classes like it; as a decorator it returns what it decorates."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else cls


def _stand_in() -> ModuleType:
    """A torch that has anything."""
    result = ModuleType("torch")
    vars(result)["__getattr__"] = partial(getattr, _Anything("torch", (), {}))
    return result
