"""The order of the samples in an epoch: a keyed permutation, computed where it is asked for, stored nowhere.

The samples 0..count-1 are the cells (x, y) of an a by b grid, a and b about the square root of the count.
One round adds a keyed hash of y to x modulo a, the next one of x to y modulo b. A round leaves alone what its
hash looks at, so it can be undone; so can six of them (a Feistel network). The grid has at most a - 1 cells
too many: what lands on one goes through the network again until it is on a sample ("cycle walking"), which
gives a permutation of the samples alone. Up to 16384 samples are sorted by a keyed hash instead: a small grid
would be too coarse to reach all orders alike.

The order of a (seed, epoch, count) never changes between versions: tests hold some of it literally.
Prior art: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from tenplexfs.errors import InvalidError

__all__ = ["COUNT_MAX", "Order"]

COUNT_MAX = 1 << 48
"""So that the bias of a round, a or b in 2^32 parts, stays under half a percent."""

_TABLE_MAX = 1 << 14
_BLOCK = 1 << 14
"""Elements worked on at a time: what a round touches stays in the cache."""
_ROUNDS = 6
_HALF = np.uint64(32)
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93))

_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Order:
    """Which sample comes when: a permutation of ``count`` samples, another one for each (seed, epoch).

    Attributes:
        count: Samples of the dataset.
        seed: 0 <= seed < 2^64.
        epoch: From 0.
        shuffle: False: position i is sample i in every epoch.

    >>> Order(count=10, seed=7, epoch=0).span(0, 10)
    array([9, 1, 2, 6, 3, 7, 8, 0, 5, 4])
    """

    count: int
    seed: int
    epoch: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.count <= COUNT_MAX:
            raise InvalidError(f"samples: need 0 <= count <= 2^48, got {self.count}")
        if not 0 <= self.seed < 1 << 64:
            raise InvalidError(f"seed: need 0 <= seed < 2^64, got {self.seed}")
        if not 0 <= self.epoch < 1 << 63:
            raise InvalidError(f"epoch: need 0 <= epoch < 2^63, got {self.epoch}")

    def span(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Returns the ids of the samples at positions [begin, end), int64.

        Raises:
            InvalidError: The positions are not those of the dataset.

        Cost: about 10 ns a sample, and the memory of the result.
        """
        if not 0 <= begin <= end <= self.count:
            raise InvalidError(f"positions [{begin}, {end}): need 0 <= begin <= end <= {self.count}")
        return self._map(np.arange(begin, end, dtype=np.int64), inverse=False)

    def ids(self, positions: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Returns the ids of the samples at ``positions`` (any shape), int64.

        Raises:
            InvalidError: A position is not of the dataset.
        """
        return self._map(self._checked(positions, "position"), inverse=False)

    def positions(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Returns where the samples ``ids`` (any shape) come in the epoch: the inverse of `ids`.

        Raises:
            InvalidError: An id is not of the dataset.
        """
        return self._map(self._checked(ids, "sample"), inverse=True)

    def _checked(self, values: npt.ArrayLike, word: str) -> npt.NDArray[np.int64]:
        given = np.asarray(values)
        if given.size and given.dtype.kind not in "iu":
            raise InvalidError(f"{word}s: need integers, got {given.dtype}")
        if given.size and not 0 <= int(given.min()) <= int(given.max()) < self.count:
            low, high = int(given.min()), int(given.max())
            raise InvalidError(f"{word} {low if low < 0 else high}: need 0 <= {word} < {self.count}")
        return np.array(given, np.int64)

    def _map(self, values: npt.NDArray[np.int64], *, inverse: bool) -> npt.NDArray[np.int64]:
        """Maps ``values``, which are this call's own, in place."""
        if not self.shuffle or self.count < 2:
            return values
        keys = _keys(self.count, self.seed, self.epoch)
        if self.count <= _TABLE_MAX:
            return np.asarray(_tables(self.count, int(keys[0]))[inverse][values])
        words = values.reshape(-1).view(np.uint64)
        for start in range(0, words.size, _BLOCK):
            _walk(words[start : start + _BLOCK], self.count, keys, inverse=inverse)
        return values


def _keys(count: int, seed: int, epoch: int) -> _Words:
    text = b"tenplexfs order 1" + b"".join(value.to_bytes(8, "little") for value in (count, seed, epoch))
    return np.frombuffer(blake2b(text, digest_size=8 * _ROUNDS).digest(), "<u8").astype(np.uint64)


@lru_cache(maxsize=32)
def _tables(count: int, key: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns a small permutation and its inverse."""
    words = np.arange(count, dtype=np.uint64) * _MIX[0] + np.uint64(key)
    for _ in range(2):
        words = (words ^ (words >> _HALF)) * _MIX[1]
    order = np.argsort(words ^ (words >> _HALF), kind="stable").astype(np.int64)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(count)
    return order, inverse


def _walk(words: _Words, count: int, keys: _Words, *, inverse: bool) -> None:
    """Maps each word in place by the network, again and again until it is below ``count``."""
    _network(words, count, keys, inverse=inverse)
    outside = np.flatnonzero(words >= count)
    while outside.size:
        again = words[outside]
        _network(again, count, keys, inverse=inverse)
        words[outside] = again
        outside = outside[again >= count]


def _network(words: _Words, count: int, keys: _Words, *, inverse: bool) -> None:
    """Permutes [0, a * b), the grid of ``count``, in place: the grid, at most a - 1 cells over ``count``."""
    rows = math.isqrt(count - 1) + 1
    a, b = np.uint64(rows), np.uint64(-(-count // rows))
    x = words // b
    words -= x * b
    hashed, scratch = np.empty_like(words), np.empty_like(words)
    rounds = range(_ROUNDS - 1, -1, -1) if inverse else range(_ROUNDS)
    for number in rounds:
        target, looked_at, modulus = (words, x, b) if number % 2 else (x, words, a)
        _hash(looked_at, keys[number], modulus, hashed, scratch)
        if inverse:
            target += modulus
            target -= hashed
        else:
            target += hashed
        # Below the modulus the difference wraps to a huge number: the minimum is the remainder.
        np.subtract(target, modulus, out=scratch)
        np.minimum(target, scratch, out=target)
    x *= b
    words += x


def _hash(words: _Words, key: np.uint64, modulus: np.uint64, out: _Words, scratch: _Words) -> None:
    """Writes a keyed hash of each word, 0 <= hash < modulus, to ``out``."""
    np.bitwise_xor(words, key, out=out)
    np.multiply(out, _MIX[0], out=out)
    np.right_shift(out, _HALF, out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, _MIX[1], out=out)
    np.right_shift(out, _HALF, out=out)
    np.multiply(out, modulus, out=out)
    np.right_shift(out, _HALF, out=out)
