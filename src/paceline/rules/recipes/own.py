# SPDX-License-Identifier: Apache-2.0
"""A rule that a module of the user's makes: `module:name`, or `module:name(setting=1)`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from paceline.core.parse import like, read_call
from paceline.errors import RuleError
from paceline.rules.rule import Rule

_NAMED = re.compile(r"\s*([A-Za-z_][\w.]*):(.*)", re.DOTALL)


def own_rule(text: str, more: Mapping[str, Any]) -> Rule | None:
    """The rule of a text `module:..`, with settings besides those in it; None for other texts. Imports the module, from
    the working directory, too; the name is that of a `Rule`, or of a function that returns one from the settings."""
    if (match := _NAMED.fullmatch(text)) is None:
        return None
    module, (name, settings) = match[1], read_call(match[2], "rule", "module:name or module:name(setting=1)")
    place, settings = f"{module}:{name}", settings | dict(more)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        values = vars(importlib.import_module(module))
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0]):
            where = f"beside the program, in {os.getcwd()} or on Python's path"
            raise RuleError(f"{text!r} names a rule in the module {module}, and there is none {where}") from error
        raise RuleError(f"{place}: importing {module} failed with {type(error).__name__}: {error}") from error
    if name not in values:
        raise RuleError(f"{module} ({values.get('__file__')}) has no {name!r}{like(name, list(values))}; name its rule")
    rule = values[name]
    if callable(rule):
        try:
            rule = rule(**settings)
        except TypeError as error:
            raise RuleError(f"{place} cannot be called with {settings or 'no settings'}: {error}") from error
    elif settings:
        raise RuleError(f"{place} is no function, so it takes no settings, got {', '.join(settings)}; leave them out")
    if not isinstance(rule, Rule):
        wanted = "it has to be, or to return, a Rule, such as Rule(EveryBlock(16), Delta(), outer=..)"
        raise RuleError(f"{place} gives a {type(rule).__name__}: {wanted}")
    return rule
