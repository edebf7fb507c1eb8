# SPDX-License-Identifier: Apache-2.0
"""Exact assignment inside lines: the words of each row to its columns, or those of each column to its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paceline_lightrnn.allocation.candidates import Costs, checked
from paceline_lightrnn.allocation.optional import assign

THREADS = 2
SMALL = 128
"""Up to so many places SciPy alone is faster than with prices."""
STEPS = 24


def settle(
    costs: Costs,
    line: np.ndarray,
    lines: int,
    places: int,
    prices: np.ndarray,
    what: str,
    told: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """The place of each word inside its line, shape (V,), int64, at least cost within each line.

    Args:
        costs: of the words in the places.
        line: shape (V,): the line of each word; at most `places` words in each.
        lines: number of lines.
        places: number of places in a line.
        prices: shape (places,): of the places, from the problem over all words; they shorten the search.
        what: name of a place in errors.
        told: called with the number of finished lines.
    """
    order = np.argsort(line, kind="stable")
    held = np.split(order, np.cumsum(np.bincount(line, minlength=lines))[:-1])
    place = np.empty(len(line), np.int64)

    def one(words: np.ndarray) -> np.ndarray:
        return cheapest_places(checked(costs, words, what), prices)

    with ThreadPoolExecutor(THREADS) as pool:
        for done, (words, found) in enumerate(zip(held, _in_order(pool, one, held), strict=True)):
            place[words] = found
            told(done + 1)
    return place


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[[np.ndarray], np.ndarray], pieces: list[np.ndarray]
) -> Iterator[np.ndarray]:
    """Results in the order of the pieces, computed a few ahead only, since each piece's costs take memory."""
    ahead = [pool.submit(work, piece) for piece in pieces[: 2 * THREADS]]
    try:
        for k in range(len(pieces)):
            yield ahead.pop(0).result()
            if k + 2 * THREADS < len(pieces):
                ahead.append(pool.submit(work, pieces[k + 2 * THREADS]))
    finally:
        for future in ahead:
            future.cancel()


def cheapest_places(cost: np.ndarray, prices: np.ndarray) -> np.ndarray:
    """Exact assignment of n words to places, cost of shape (n, places), n at most places.

    Prices of places change the cost of every complete assignment by the same sum. With words without cost for the empty
    places they change the search only: good ones shorten it many times.
    """
    words, places = cost.shape
    if words == 0:
        return np.empty(0, np.int64)
    full = np.zeros((places, places), np.float32)
    np.subtract(cost, cost.min(1, keepdims=True), out=full[:words])
    if places > SMALL:
        prices = even_prices(full, prices)
    rows, columns = assign(full.astype(np.float64) + prices)
    found = np.empty(places, np.int64)
    found[rows] = columns
    return found[:words]


def even_prices(cost: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Prices, shape (places,), under which about one word chooses each place: Sinkhorn's iteration, cooling."""
    prices = start.astype(np.float32)
    near = np.partition(cost + prices, min(8, len(prices) - 1), axis=1)[:, : min(8, len(prices))]
    margin = float(np.median(near.mean(1) - near.min(1)))
    if margin <= 0:
        return start
    x = np.empty_like(cost)
    for temperature in np.geomspace(2 * margin, 0.05 * margin, STEPS).astype(np.float32):
        np.add(cost, prices, out=x)
        x -= x.min(1, keepdims=True)
        x *= -1 / temperature
        np.exp(x, out=x)
        load = (1 / x.sum(1)) @ x
        prices = prices + temperature * np.log(np.maximum(load, 0.05))
    return prices.astype(np.float64)
