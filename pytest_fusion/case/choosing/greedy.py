"""covertable's greedy choice of the next pair of levels, over arrays: the same pairs as its own, in the same order.

Its own counts, for each candidate, all pairs of what the row would then hold: 12 s for 31 factors. Here those counts
are kept up to date: 0.4 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def extract(control: Any) -> Iterator[tuple[int, int]]:
    """The pairs that one row of a covering array of strength 2, without constraints, is made of.

    ``control`` is covertable's, whose row is empty: ``incomplete`` has the pairs of levels that no row holds yet, best
    first, ``parents`` the factor of each level. The next pair is the first whose new levels meet for the first time, on
    average, more than one in each place of the row; if there is none, the one that completes most pairs.
    """
    factors = np.array([control.parents[level] for level in range(len(control.parents))])
    pairs = np.array(list(control.incomplete), dtype=np.intp).reshape(-1, 2)
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
        yield int(chosen[0]), int(chosen[1])
        for level in chosen[free[chosen]]:
            taken[factors == factors[level]] = True
            free[factors == factors[level]] = False
            taken[level] = False
            completed += missing[level]
            size += 1
        pairs = pairs[~taken[pairs].any(1) & free[pairs].any(1)]
