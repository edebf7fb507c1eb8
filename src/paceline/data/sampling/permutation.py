# SPDX-License-Identifier: Apache-2.0
"""A shuffled order of n samples that takes no memory: a permutation that is computed place by place.

A generalised Feistel network over pairs. Every x < n is written as x = a' R + b', with sides L and R of about sqrt(n)
each and L R >= n; a round adds to one half a keyed hash of the other, in turns::

    a <- (a + h_k(b)) mod L        b <- (b + h_k+1(a)) mod R

Each round can be undone, so the whole is a permutation of 0 .. L R. A result that is not below n goes through the
network again (cycle walking) until it is; because L R < n + 2 sqrt(n) + 1, hardly any does.

Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (the generalised Feistel cipher,
and cycle walking). The hash is the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014). This is for shuffling,
not for secrets.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
Words = NDArray[np.uint64]

ROUNDS = 12
LIMIT = 1 << 62
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of 0 .. n (excl.), one of many, named by its key.

    Args:
        n: number of samples, 0 .. 2^62.
        key: any whole number; close keys give unrelated orders, the same on every machine.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= LIMIT:
            raise ValueError(f"a permutation of {n} samples cannot be made; give 0 to 2^62")
        self.n = n
        left = max(1, math.isqrt(n))
        if left * left < n:
            left += 1
        self._left, self._right = left, max(1, -(-n // left))
        self._keys = [_mixed_number((key + (k + 1) * _GOLDEN) & _MASK) for k in range(ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def at(self, places: Places) -> Places:
        """The samples at these places.

        Args:
            places: int64, shape (m,), each 0 .. n (excl.).

        Returns:
            int64, shape (m,).
        """
        permuted = self._once(places.astype(np.uint64))
        while (outside := permuted >= self.n).any():
            permuted[outside] = self._once(permuted[outside])
        return permuted.astype(np.int64)

    def _once(self, x: Words) -> Words:
        left, right = np.uint64(self._left), np.uint64(self._right)
        a, b = x // right, x % right
        for k in range(0, ROUNDS, 2):
            a = _sum(a, _mixed(b ^ np.uint64(self._keys[k])) % left, left)
            b = _sum(b, _mixed(a ^ np.uint64(self._keys[k + 1])) % right, right)
        words: Words = a * right + b
        return words


def _sum(x: Words, y: Words, modulus: np.uint64) -> Words:
    """x + y modulo `modulus`, for x and y below it; what would be below 0 wraps round to more than the sum is."""
    x = x + y
    reduced: Words = np.minimum(x, x - modulus)
    return reduced


def _mixed(x: Words) -> Words:
    """The finaliser of splitmix64, element by element, modulo 2^64; made in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _mixed_number(x: int) -> int:
    """The same of one number."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
