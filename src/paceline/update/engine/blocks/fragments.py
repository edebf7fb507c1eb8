# SPDX-License-Identifier: Apache-2.0
"""Distributes a model's parameters over fragments, layer by layer."""

from __future__ import annotations

import re

from paceline.core.optimizer_state import Owned
from paceline.errors import UnsupportedError


def staggered(owned: Owned, fragments: int) -> list[Owned]:
    """Distribute a model's parameters over fragments, layer by layer, each to the smallest fragment so far.

    With equal layers that is the strided pattern of the Streaming DiLoCo publication. Parameters of a layer share their
    name up to the first number; if there are fewer layers than fragments, each parameter is a layer.
    """
    if fragments == 1:
        return [owned]
    named = [(name, p.numel()) for _, pairs in owned for name, p in pairs if p.numel()]
    if len(named) < fragments:
        raise UnsupportedError(
            f"the model has {len(named)} trainable parameters and cannot be exchanged in {fragments} fragments; "
            "use fewer fragments"
        )
    layers: dict[str, int] = {}
    for name, numel in named:
        layers[_layer(name)] = layers.get(_layer(name), 0) + numel
    key = _layer if len(layers) >= fragments else str
    sizes: dict[str, int] = {}
    for name, numel in named:
        sizes[key(name)] = sizes.get(key(name), 0) + numel
    loads, place = [0] * fragments, {}
    empty = fragments
    for number, (layer, numel) in enumerate(sizes.items()):
        least = loads.index(min(loads))
        if len(sizes) - number <= empty:  # every fragment needs a parameter
            least = loads.index(0)
        empty -= loads[least] == 0
        place[layer] = least
        loads[least] += max(numel, 1)
    return [
        [(optimizer, [(n, p) for n, p in pairs if place.get(key(n), 0) == f]) for optimizer, pairs in owned]
        for f in range(fragments)
    ]


def _layer(name: str) -> str:
    match = re.match(r"(.*?\d+)(\.|$)", name)
    return match.group(1) if match else name.split(".", 1)[0]
