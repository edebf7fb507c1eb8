# SPDX-License-Identifier: Apache-2.0
"""The options that recipes of blocks share show in each recipe as if they were written there."""

from __future__ import annotations

import inspect

import pytest

from paceline.rules import recipes
from paceline.rules.recipes import RECIPES
from paceline.rules.schedule import EveryBlock

SIGNATURES = {
    "auto": """
        share: float = 0.02
        first: int = 4
        longest: int = 64
        probe: int = 10
        sync_rate: float = 0.5
        overlap: int | None = None
        codec: str | None = None
        within: str = ''
        ema: float = 0.0
        gain: float | str = 'auto'
        beta1: float | None = 0.5
        amplify: float = 0.0
        warmup: int = 0
        ramp: int = 0
        restart: int = 0
        fragments: int = 1
        grow: str | None = None
        rate_exponent: float | None = 0.29
        dimensions: Dimensions = None
        reproducible: bool = False
        chunks: int = 8
    """,
    "averaging": """
        period: int = 16
        warmup: int = 0
        ema: float = 0.0
        local_state: str = 'auto'
        fragments: int = 1
        overlap: int = 0
        alone: bool = False
        grow: str | None = None
        rate_exponent: float | None = None
        codec: str = 'dense'
        within: str = ''
        dimensions: Dimensions = None
        reproducible: bool = False
        chunks: int = 8
    """,
    "bmuf": """
        period: int = 16
        momentum: float | None = None
        lr: float | None = None
        gain: float | str = 'auto'
        nesterov: bool = True
        amplify: float = 0.0
        warmup: int = 0
        ramp: int = 0
        restart: int = 0
        ema: float = 0.0
        local_state: str = 'auto'
        fragments: int = 1
        overlap: int = 0
        alone: bool = False
        grow: str | None = None
        rate_exponent: float | None = None
        codec: str = 'dense'
        within: str = ''
        dimensions: Dimensions = None
        reproducible: bool = False
        chunks: int = 8
    """,
    "bmuf_adam": """
        period: int = 8
        momentum: float | None = None
        lr: float | None = None
        gain: float | str = 'auto'
        nesterov: bool = True
        beta1: float | None = 0.5
        amplify: float = 0.0
        warmup: int = 0
        ramp: int = 0
        restart: int = 0
        ema: float = 0.0
        local_state: str = 'compensate'
        fragments: int = 1
        overlap: int = 0
        alone: bool = False
        grow: str | None = None
        rate_exponent: float | None = None
        codec: str = 'dense'
        within: str = ''
        dimensions: Dimensions = None
        reproducible: bool = False
        chunks: int = 8
    """,
    "diloco": """
        period: int = 16
        momentum: float | None = None
        lr: float | None = None
        gain: float | str = 'auto'
        warmup: int = 0
        ramp: int = 0
        restart: int = 0
        ema: float = 0.0
        local_state: str = 'keep'
        fragments: int = 1
        overlap: int = 0
        alone: bool = False
        grow: str | None = None
        rate_exponent: float | None = None
        codec: str = 'dense'
        within: str = ''
        dimensions: Dimensions = None
        reproducible: bool = False
        chunks: int = 8
    """,
    "streaming_diloco": """
        period: int = 16
        momentum: float | None = None
        lr: float | None = None
        gain: float | str = 'auto'
        warmup: int = 0
        ramp: int = 0
        restart: int = 0
        ema: float = 0.0
        local_state: str = 'keep'
        fragments: int = 4
        overlap: int = 2
        alone: bool = False
        grow: str | None = None
        rate_exponent: float | None = None
        mixing: float | None = 0.5
        codec: str = 'e3m0'
        within: str = ''
        dimensions: Dimensions = None
        reproducible: bool = False
        chunks: int = 8
    """,
}
"""Parameters, their types and their defaults as they were when each recipe wrote them itself."""


def signature(name: str) -> list[inspect.Parameter]:
    return list(inspect.signature(RECIPES[name].function).parameters.values())


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_recipe_lists_its_parameters_in_order(name: str) -> None:
    found = [f"{one.name}: {one.annotation} = {one.default!r}" for one in signature(name)]
    assert found == [line.strip() for line in SIGNATURES[name].split("\n") if line.strip()]
    assert {one.kind for one in signature(name)} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", SIGNATURES)
def test_help_explains_each_parameter_once(name: str) -> None:
    doc = inspect.getdoc(RECIPES[name].function) or ""
    arguments = doc.partition("\nArgs:\n")[2]
    named = [line.strip().partition(":")[0] for line in arguments.splitlines() if line[4:5].strip()]
    assert named == [one.name for one in signature(name)]


def test_a_recipes_own_description_replaces_the_shared_one() -> None:
    assert "    period: H, inner steps between two outer steps (" in (recipes.diloco.__doc__ or "")
    assert "    period: tau, minibatches of a block on each worker." in (recipes.bmuf.__doc__ or "")


def test_options_reach_the_rule() -> None:
    rule = recipes.streaming_diloco(period=8, warmup=3, chunks=2, reproducible=True)
    assert rule.schedule == EveryBlock(8, 3, 4, 2)
    assert rule.common.chunks == 2
    assert rule.codec.exact is False


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"bmuf\(\) got an unexpected keyword argument 'perod'"):
        recipes.bmuf(perod=8)  # type: ignore[call-arg]
