# SPDX-License-Identifier: Apache-2.0
"""The class of recipes, and settings that many share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.parse import check_bool, check_whole, like
from paceline.errors import RuleError
from paceline.rules.codec import Codec, Warmed, codec_from_text
from paceline.rules.rule import RecipeCall, Rule
from paceline.rules.topology import Flat, Hierarchical, Ordered, Topology

Dimensions = str | tuple[int, ...] | None


def carried_by(
    codec: Codec | str, warmup: int, dimensions: Dimensions, reproducible: bool, chunks: int
) -> dict[str, Any]:
    """Codec and topology, as fields of a `Rule`."""
    check_whole("warmup", warmup, 0, "of steps")
    if not isinstance(codec, str) and not hasattr(codec, "exchange"):
        raise RuleError(f"codec must be a word such as 'int8' or 'low_rank(rank=2)', got {codec!r}")
    written = codec_from_text(codec) if isinstance(codec, str) else codec
    route: Topology
    if dimensions is not None:
        route = Hierarchical(dimensions, chunks, reproducible)  # type: ignore[arg-type]
    else:
        route = Ordered(chunks) if reproducible else Flat(chunks)
    return {"codec": Warmed(written, warmup) if warmup else written, "topology": route}


def between(within: str, codec: str, dimensions: Dimensions, reproducible: bool, chunks: int) -> dict[str, Any]:
    """The same for blocks; with `within`, each process of a host sends its share of the host's traffic."""
    dimensions = "hosts" if within and dimensions is None else dimensions
    return carried_by(codec, 0, dimensions, reproducible, chunks)


@dataclass(frozen=True)
class Recipe:
    """A named rule and where it comes from.

    Attributes:
        name: as written on the command line.
        summary: one line.
        equation: the method in a few lines.
        source: the publication.
        when: when to use it.
        function: builds the rule.
    """

    name: str
    summary: str
    equation: str
    source: str
    when: str
    function: Callable[..., Rule]

    def build(self, **arguments: Any) -> Rule:
        """The rule with `arguments`; raises `RuleError` for unknown or invalid ones."""
        known = inspect.signature(self.function).parameters
        for name, value in arguments.items():
            if name not in known:
                raise RuleError(
                    f"{self.name} has no setting {name!r}{like(name, list(known))}; it has {', '.join(known)}"
                )
            if known[name].annotation == "bool":
                check_bool(name, value)
        return replace(self.function(**arguments), name=RecipeCall(self.name, arguments))
