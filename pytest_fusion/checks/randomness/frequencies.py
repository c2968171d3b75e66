"""Draws counted by classes of entries: how many more or fewer than expected, over all rows and in each.

A fault of every row shows in a class that all rows share, such as the likeliest quarter of each, or the entry at which
another input is largest: its draws of all rows and calls add up. A class that ends within an entry has a share of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pytest_fusion.case import counter_random
from pytest_fusion.checks.randomness import chance

# Parts of equal probability of an ordered vocabulary; its classes are the first entry, the first parts, and each part.
PARTS = 16
CLASSES = 2 * PARTS - 1
# Inputs with a number for each entry, by whose orders and those of whose differences classes are made.
_MOST_INPUTS = 3

ROWS, CALLS, _BY_ROW = "between rows", "between calls", " in single rows"


@dataclass(frozen=True, slots=True)
class Classes:
    """For each class its excess over the expected number, and that one's variance, of ``draws`` of all together.

    ``largest`` is the most that one draw adds. Of draws that are alike, ``draws`` are pairs, and excess is the sum of
    their products.
    """

    excess: torch.Tensor
    variance: torch.Tensor
    draws: int
    largest: float = 1.0

    def __add__(self, other: Classes) -> Classes:
        largest = max(self.largest, other.largest)
        return Classes(self.excess + other.excess, self.variance + other.variance, self.draws + other.draws, largest)

    @property
    def p(self) -> torch.Tensor:
        """The probability of as much by chance."""
        return chance.tail(self.excess, self.variance, self.largest)


Seen = Mapping[str, Classes]


def pooled(one: Seen, other: Seen) -> Seen:
    """The draws of two cases, but for single rows, which each has for itself."""
    shared = {f: one[f] + other[f] for f in one.keys() & other.keys() if not f.endswith(_BY_ROW)}
    return {f: c for f, c in {**one, **other, **shared}.items() if not f.endswith(_BY_ROW)}


def seen_in(every: Sequence[torch.Tensor], drawn: torch.Tensor, inputs: Mapping[str, torch.Tensor], seed: int) -> Seen:
    """Draws ``(calls, rows)`` by classes of the vocabulary in several orders, over all rows and in each, and in pairs.

    ``every`` are the probabilities ``(rows, vocabulary)`` in several roundings of the reference: each class is compared
    with the one that fits it best. Inputs have the same shape. ``seed`` is for random numbers.
    """
    p = every[0]
    counts = torch.zeros_like(p).scatter_add_(-1, drawn.T, torch.ones_like(drawn.T, dtype=p.dtype))
    keys = dict(itertools.islice(inputs.items(), _MOST_INPUTS))
    keys |= {f"{a} - {b}": keys[a] - keys[b] for a, b in itertools.combinations(keys, 2)}
    orders = {"in its own order": torch.arange(p.shape[-1], device=p.device).expand_as(p)}
    for name, key in {"probability": p, **keys}.items():
        orders[f"by falling {name}"] = key.argsort(dim=-1, descending=True, stable=True)
    found = _alike(p, drawn, seed)
    for label, order in orders.items():
        found |= _ordered(counts, every, order, label)
    return found


def _alike(p: torch.Tensor, drawn: torch.Tensor, seed: int) -> dict[str, Classes]:
    """Whether the rows of a call, and successive calls, are drawn alike, by places in the rows' probabilities."""
    # Random numbers spread a draw over its own probability for an exact law (randomised probability integral
    # transform); places have mean 0 and variance 1.
    below, own = (p.cumsum(-1) - p).gather(-1, drawn.T), p.gather(-1, drawn.T)
    places = below + own * counter_random.uniform(tuple(own.shape), seed, own.device)
    places = (places - 0.5) * math.sqrt(12)
    rows, calls = places.shape
    # The square of a call's sum has the tail of chi-square (Laurent and Massart, 2000), that of few rows a lighter one.
    products = (places.sum(0).square() - places.square().sum(0)).sum() / 2
    found = {
        ROWS: (products, calls * rows * (rows - 1) // 2, 3.0 * rows),
        CALLS: ((places[:, 1:] * places[:, :-1]).sum(), (calls - 1) * rows, 3.0),
    }
    return {
        kind: Classes(total[None], torch.full_like(total[None], pairs), pairs, largest)
        for kind, (total, pairs, largest) in found.items()
        if pairs
    }


def _ordered(
    counts: torch.Tensor, every: Sequence[torch.Tensor], order: torch.Tensor, label: str
) -> dict[str, Classes]:
    """The classes of an ordered vocabulary, over all rows and in each."""
    count, own, *others = (t.gather(-1, order) for t in (counts, *every))
    draws = count.sum(-1, keepdim=True)
    edges = torch.arange(PARTS + 1, dtype=own.dtype, device=own.device) / PARTS
    smallest = torch.finfo(own.dtype).tiny
    share = ((edges - (own.cumsum(-1) - own)[..., None]) / own.clamp_min(smallest)[..., None]).clamp(0, 1)
    first = torch.zeros_like(share[..., :1])
    first[:, 0] = 1
    members = torch.cat([first, share[..., 1:PARTS], share.diff(dim=-1)[..., 1:]], -1)

    def total(weights: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return torch.einsum("rv,rvc->rc", weights, of)

    excess = torch.stack([total(count - draws * p, members) for p in (own, *others)])
    variance = (draws * (total(own, members.square()) - total(own, members).square())).clamp_min(0)
    return {
        label: Classes(_nearest(excess.sum(1)), variance.sum(0), int(draws.sum())),
        label + _BY_ROW: Classes(_nearest(excess).flatten(), variance.flatten(), int(draws.max())),
    }


def _nearest(excess: torch.Tensor) -> torch.Tensor:
    """The least along the first axis, 0 where the signs differ."""
    same = (excess.sign() == excess[:1].sign()).all(0)
    return torch.where(same, excess.abs().amin(0) * excess[0].sign(), 0.0)


def described(family: str, index: int) -> str:
    """The words for a class of a family."""
    row, which = divmod(index, CLASSES)
    where = f"row {row}" if family.endswith(_BY_ROW) else "each row"
    part = "entry" if which == 0 else f"{which}/{PARTS}"
    what = f"the first {part}" if which < PARTS else f"part {which - PARTS + 2} of {PARTS}"
    return f"{what} of {where}, {family.removesuffix(_BY_ROW)}"
