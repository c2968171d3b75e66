"""Covering arrays of strength 2: every pair of levels of two factors in few rows, chosen greedily.

Order and choice of pairs are those of covertable 3.2, so that a test keeps its cases. That library counts, for each
candidate, all pairs of what the row would then hold: 12 s for 31 factors. Counts that are kept up to date take 0.4 s.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.intp]


def covering_array(counts: Sequence[int]) -> Iterator[list[int]]:
    """Rows of one level for each of several factors, which have so many levels each."""
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.intp)
    factors = np.repeat(np.arange(len(counts)), counts)
    levels = [range(start, start + count) for start, count in zip(starts.tolist(), counts, strict=True)]
    every = [pair for two in itertools.combinations(levels, 2) for pair in itertools.product(*two)]
    pairs = np.array(sorted(every, key=_hashed), dtype=np.intp).reshape(-1, 2)
    while len(pairs):
        # A factor that no chosen pair has takes its first level.
        row = starts.copy()
        for level in _chosen(pairs, factors):
            row[factors[level]] = level
        yield (row - starts).tolist()
        pairs = pairs[(row[factors[pairs]] != pairs).any(1)]


def _chosen(pairs: Ints, factors: Ints) -> Iterator[int]:
    """The levels of one row; ``pairs`` are those that no row has yet, ``factors`` the factor of each level.

    The next pair is the first whose new levels meet for the first time, on average, more than one in each place of the
    row; if there is none, the one that completes most pairs.
    """
    missing = np.zeros((len(factors), len(factors)), dtype=np.int64)
    missing[pairs[:, 0], pairs[:, 1]] = missing[pairs[:, 1], pairs[:, 0]] = 1
    completed = np.zeros(len(factors), dtype=np.int64)  # pairs that each level would complete with the row's
    free, taken = np.ones(len(factors), dtype=bool), np.zeros(len(factors), dtype=bool)
    size = 0
    while len(pairs):
        new = free[pairs]
        count = new.sum(1)
        completes = (completed[pairs] * new).sum(1) + (count == 2)
        enough = completes > size * count
        chosen = pairs[enough.argmax() if enough.any() else completes.argmax()]
        for level in chosen[free[chosen]]:
            taken[factors == factors[level]] = True
            free[factors == factors[level]] = False
            taken[level] = False
            completed += missing[level]
            size += 1
            yield int(level)
        pairs = pairs[~taken[pairs].any(1) & free[pairs].any(1)]


def _hashed(pair: tuple[int, int]) -> int:
    """FNV-1a of a pair, which orders pairs at random and yet alike in every process."""
    value = 0x811C9DC5
    for byte in b"%d,%d " % pair:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value
