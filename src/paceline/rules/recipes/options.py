# SPDX-License-Identifier: Apache-2.0
"""The class of recipes, and the options that they share: types, defaults and descriptions.

A recipe names its options by a `TypedDict`, and may override defaults and descriptions. The decorator gives it a full
signature and an `Args` section, for `help`, editors and the documentation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, cast

from paceline.core.parse import check_bool, check_whole, like
from paceline.errors import RuleError
from paceline.rules.codec import Codec, Warmed, codec_from_text
from paceline.rules.rule import BlockSettings, RecipeCall, Rule
from paceline.rules.schedule import EveryBlock
from paceline.rules.schedule.growth import make_growth
from paceline.rules.topology import Flat, Hierarchical, Ordered, Topology

Dimensions = str | tuple[int, ...] | None

ADAM_BETA1 = 0.5
"""Better than 0.9 under block momentum, on lines and on speech (records/2026-11-22_lines, 2026-11-22_speech)."""


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


class RouteOptions(TypedDict, total=False):
    """The route."""

    dimensions: Dimensions
    reproducible: bool
    chunks: int


class CommonOptions(RouteOptions, total=False):
    """Warm-up, fragments, a number of workers that grows, and what is exported, of all rules of blocks."""

    ema: float
    warmup: int
    fragments: int
    grow: str | None
    rate_exponent: float | None
    within: str
    even: bool


class BlockOptions(CommonOptions, total=False):
    """Blocks of a fixed period."""

    period: int
    overlap: int
    codec: str
    alone: bool
    local_state: str


class OuterOptions(BlockOptions, total=False):
    """An outer step with momentum."""

    momentum: float | None
    lr: float | None
    gain: float | str
    ramp: int


class MomentumOptions(OuterOptions, total=False):
    """Block momentum."""

    nesterov: bool
    amplify: float


class AdamOptions(MomentumOptions, total=False):
    """Block momentum around Adam."""

    beta1: float | None


class StreamingOptions(OuterOptions, total=False):
    """Exchanges that overlap the next steps."""

    mixing: float | None


class PacedOptions(CommonOptions, total=False):
    """Block momentum whose period follows measured times, which choose codec and overlap, too."""

    gain: float | str
    beta1: float | None
    ramp: int
    amplify: float


@dataclass(frozen=True)
class _Option:
    annotation: str
    default: Any
    meaning: str


_OPTIONS = {
    "period": _Option("int", 16, "tau, minibatches of a block on each worker."),
    "momentum": _Option("float | None", None, "block momentum eta; None follows from the gain."),
    "lr": _Option("float | None", None, "block learning rate zeta; None follows from the gain."),
    "gain": _Option(
        "float | str",
        "auto",
        'zeta/(1-eta): "auto" (:mod:`paceline.rules.outer.gain`), "paper" (eta = 1-1/N, zeta = 1) or a number.',
    ),
    "nesterov": _Option("bool", True, "True for Nesterov block momentum, False for classical."),
    "beta1": _Option(
        "float | None",
        ADAM_BETA1,
        "of Adam and AdamW on the workers, where it is larger and there are several; None leaves it.",
    ),
    "amplify": _Option(
        "float",
        0.0,
        "p, by whose power of the workers' diversity a block's mean displacement is made longer; 0 leaves it\n"
        "    (:mod:`paceline.rules.outer.diversity`).",
    ),
    "warmup": _Option("int", 0, "synchronous steps before the first block."),
    "ramp": _Option("int", 0, "blocks over which eta rises from 0."),
    "ema": _Option(
        "float",
        0.0,
        "b of the moving average of the global model that is exported and evaluated; 0 takes the model itself\n"
        "    (:mod:`paceline.rules.outer.moving_average`).",
    ),
    "local_state": _Option(
        "str",
        "auto",
        "what a block starts from in the local optimizer: keep (auto does), reset, average, compensate\n"
        "    (:mod:`paceline.rules.payload`).",
    ),
    "fragments": _Option("int", 1, "parts of the model that are exchanged one after another over the block."),
    "overlap": _Option("int", 0, "minibatches that are made while an exchange is under way; 0 waits for it."),
    "alone": _Option(
        "bool", False, "whether a single worker ends its blocks with the outer step, too (Lookahead, SNOO)."
    ),
    "grow": _Option(
        "str | None",
        None,
        'how the number of workers of an elastic run grows: "auto" from what they are worth, or stages such as\n'
        '    "2:4000, 8:16000", 2 workers up to 4,000 minibatches of all; None if all train\n'
        "    (:mod:`paceline.rules.schedule.growth`).",
    ),
    "rate_exponent": _Option(
        "float | None",
        None,
        "s, where each of k workers has k^s times the local learning rate of one; None for 0.29 where the number of\n"
        "    workers grows, else 0.",
    ),
    "mixing": _Option(
        "float | None",
        None,
        "alpha, the share of the local parameters that stays when an exchange lands; None keeps the progress made\n"
        "    meanwhile instead (:mod:`paceline.rules.payload`).",
    ),
    "codec": _Option(
        "str", "dense", "how the delta is written: dense, bf16, fp16, int8, e3m0, one_bit, sign, low_rank, top_k."
    ),
    "within": _Option(
        "str", "", '"host" makes the processes of a host one worker, which makes synchronous steps inside.'
    ),
    "even": _Option(
        "bool",
        True,
        "True for equally many minibatches of all workers; False for as many as they make in the same time\n"
        "    (:mod:`paceline.rules.schedule.uneven`), with one fragment.",
    ),
    "dimensions": _Option(
        "Dimensions", None, 'None sums over all at once; "hosts" first within each host; or sizes like (4, 2).'
    ),
    "reproducible": _Option("bool", False, "sum in rank order."),
    "chunks": _Option("int", 8, "pieces into which an exchange is cut."),
}
"""In the order of signatures."""

Make = TypeVar("Make", bound=Callable[..., Rule])


def takes(options: type[Any], **defaults: Any) -> Callable[[Make], Make]:
    """Give a recipe `def name(*, own=.., **options: Unpack[Options]) -> Rule` the options of a `TypedDict`.

    Args:
        options: the `TypedDict`.
        defaults: defaults that differ in this recipe.
    """
    kind = inspect.Parameter.KEYWORD_ONLY

    def decorate(make: Make) -> Make:
        signature = inspect.signature(make)
        own = [p for p in signature.parameters.values() if p.kind is kind]
        shared = [
            inspect.Parameter(name, kind, default=defaults.get(name, one.default), annotation=one.annotation)
            for name, one in _OPTIONS.items()
            if name in options.__annotations__
        ]
        full = signature.replace(parameters=[*own, *shared])

        @functools.wraps(make)
        def filled(**given: Any) -> Rule:
            for name in given:
                if name not in full.parameters:
                    raise TypeError(f"{make.__name__}() got an unexpected keyword argument {name!r}")
            return make(**{name: p.default for name, p in full.parameters.items()} | given)

        filled.__signature__ = full  # type: ignore[attr-defined]
        filled.__doc__ = _with_arguments(make.__doc__ or "", list(full.parameters))
        return cast(Make, filled)

    return decorate


def _with_arguments(doc: str, names: list[str]) -> str:
    """The docstring with all options in its `Args` section; its own descriptions replace the shared ones."""
    text, _, section = inspect.cleandoc(doc).partition("\n\nArgs:\n")
    described: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, _, line = line.strip().partition(": ")
            described[name] = line
        elif line.strip():
            described[name] += "\n    " + line.strip()
    rows = [f"{name}: {described.get(name) or _OPTIONS[name].meaning}" for name in names]
    return text + "\n\nArgs:\n" + "\n".join("    " + row.replace("\n", "\n    ") for row in rows) + "\n"


def fields(options: CommonOptions, codec: str, alone: bool = False) -> dict[str, Any]:
    """Codec, topology and settings that the options of blocks describe, as fields of a `Rule`."""
    exponent = 0.0 if options["grow"] is not None else options["rate_exponent"] or 0.0  # else the growth has it
    alike = bool(options["within"]) or options["grow"] is not None or options["fragments"] > 1
    even = options["even"] or options["reproducible"] or alike
    settings = BlockSettings(options["within"], options["ema"], alone, exponent, even)
    # with `within`, each process of a host sends its share of the host's traffic
    dimensions = "hosts" if options["within"] and options["dimensions"] is None else options["dimensions"]
    wire = carried_by(codec, 0, dimensions, options["reproducible"], options["chunks"])
    return {"settings": settings, **wire}


def block_fields(options: BlockOptions) -> dict[str, Any]:
    """The same, and the schedule of blocks of a fixed period."""
    shared = fields(options, options["codec"], options["alone"])
    grow = None if options["grow"] is None else make_growth(options["grow"], options["rate_exponent"])
    schedule = EveryBlock(options["period"], options["warmup"], options["fragments"], options["overlap"], grow=grow)
    return {"schedule": schedule, **shared}


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
