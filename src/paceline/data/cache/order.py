# SPDX-License-Identifier: Apache-2.0
"""The order in which to go through files when the cache holds only some of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def keep_hits(order: Sequence[str], cached: Collection[str]) -> list[str]:
    """What is in the cache first, then the rest, both in the order that they had.

    A cache that drops the least recently used file is at its worst when an epoch does not fit: in the same order
    again, each file is dropped shortly before its turn, and there is not one hit; in a random order there are about
    half as many as there could be. Going first through what is there gives as many hits as there are files in the
    cache: c of n files, so a part c / n of every epoch but the first. They have been used by the time that the others
    come and push them out, and the epoch ends with the others in the cache, with which the next one begins.

    How it goes together with the rest:

    - *Exactness.* The result is a permutation of `order`, whatever `cached` says, wrong or out of date included; urls
      in `cached` that are not in `order` are not added, and one that is twice in `order` stays twice.
    - *A seeded permutation.* Give the epoch's seeded order (of files or of blocks): each of the two parts keeps it. Two
      parts instead of one are less random than a full permutation: what came late in one epoch comes early in the
      next. Where samples are drawn from a buffer of several files, they are still mixed within it.
    - *The ledger.* What is cached depends on the machine, so the result is not a function of (seed, epoch) and must
      not replace the epoch's order, which all workers compute alike. Use it for the order in which one worker goes
      through the positions that it holds anyway (its lease, or its host's part): leases and done marks are sets of
      positions, and no set changes. A resume reads the marks and needs neither `cached` nor the old result.

    Args:
        order: urls in the epoch's order.
        cached: urls that are in the cache now, such as `cache.cached(order)`.
    """
    there = cached if isinstance(cached, (set, frozenset, dict)) else set(cached)
    return [url for url in order if url in there] + [url for url in order if url not in there]
