# SPDX-License-Identifier: Apache-2.0
"""What a recipe is, and the settings that many share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.parse import like
from paceline.errors import RuleError
from paceline.rules.codec import Codec, Warmed, codec_from_text
from paceline.rules.rule import RecipeCall, Rule
from paceline.rules.topology import Flat, Hierarchical, Ordered, Topology

Dimensions = str | tuple[int, ...] | None


def carried_by(
    codec: Codec | str, warmup: int, dimensions: Dimensions, reproducible: bool, chunks: int
) -> dict[str, Any]:
    """How a payload is written, and over which route."""
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise RuleError(f"warmup must be a whole number of steps, at least 0, got {warmup!r}")
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
    """The same for blocks; between hosts, each process of a host carries its share of what the host sends."""
    dimensions = "hosts" if within and dimensions is None else dimensions
    return {"within": within, **carried_by(codec, 0, dimensions, reproducible, chunks)}


@dataclass(frozen=True)
class Recipe:
    """A named rule and where it comes from.

    Attributes:
        name: as one writes it.
        summary: one line.
        equation: the method in a few lines.
        source: the publication.
        when: when to take it.
        function: what builds the rule.
    """

    name: str
    summary: str
    equation: str
    source: str
    when: str
    function: Callable[..., Rule]

    def build(self, **arguments: Any) -> Rule:
        """The rule with `arguments`; `RuleError` for one that does not exist or has a senseless value."""
        known = list(inspect.signature(self.function).parameters)
        for name in arguments:
            if name not in known:
                raise RuleError(f"{self.name} has no setting {name!r}{like(name, known)}; it has {', '.join(known)}")
        return replace(self.function(**arguments), name=RecipeCall(self.name, arguments))
