"""What kernels with seeded dropout share: thresholds for words of Philox, which seeds and probabilities there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.language as tl

from reference_kernels._common import jit

# The upper 24 bits of a word are compared: p = 0 and p = 1 both have a threshold, and p is met to 3e-8.
LEVELS = 2**24
# The fewest rounds of Philox 4x32 that pass BigCrush (Salmon et al., table 2); flash-attention's dropout takes as many.
ROUNDS = tl.constexpr(7)


def seeded_jit(*numbers: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` for a kernel with a seed and a threshold: nothing is compiled anew for one that is 1 or a multiple
    of 16, in the middle of training; nor for the other ``numbers``."""
    return partial(jit, do_not_specialize=["seed", "threshold", *numbers])


@jit
def philox(seed: tl.tensor, call: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The four words of ``tl.randint4x(seed, call, n_rounds=7)`` for the int64 ``call``, to the bit.

    Triton takes the halves of a product by two multiplications, which ptxas does not make one again.
    """
    key0 = seed.to(tl.uint32)
    key1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    word0, word1 = call.to(tl.uint32), (call >> 32).to(tl.uint32)
    word2, word3 = word0 * 0, word0 * 0
    for _ in tl.static_range(ROUNDS):
        even = word0.to(tl.uint64) * 0xD2511F53
        odd = word2.to(tl.uint64) * 0xCD9E8D57
        word0 = (odd >> 32).to(tl.uint32) ^ word1 ^ key0
        word1 = odd.to(tl.uint32)
        word2 = (even >> 32).to(tl.uint32) ^ word3 ^ key1
        word3 = even.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return word0, word1, word2, word3


@jit
def survives(word: tl.tensor, threshold: tl.tensor) -> tl.tensor:
    """Whether an element is kept whose word of Philox is ``word`` (int32)."""
    return (word.to(tl.uint32, bitcast=True) >> 8).to(tl.int32) >= threshold


def odds(p: float) -> tuple[int, float]:
    """The threshold that a word must reach, and what makes up for the dropped ones: ``1 / (1 - p)``, 0 at ``p = 1``."""
    return round(p * LEVELS), 1 / (1 - p) if p < 1 else 0.0


def check_dropout(kernel: str, seed: int, p: float, name: str = "p") -> None:
    """Raise `TypeError` for a seed that is no whole number, `ValueError` for one, or a probability, out of range."""
    if isinstance(seed, bool) or not isinstance(seed, int | torch.SymInt):
        raise TypeError(f"{kernel}: seed is {seed!r}; give a whole number, for example torch.initial_seed() % 2**63")
    if not 0 <= seed < 2**63:
        raise ValueError(f"{kernel}: seed is {seed}, supported: 0 to 2**63 - 1")
    if not 0 <= p <= 1:
        raise ValueError(f"{kernel}: {name} is {p}, supported: 0 to 1, the probability to drop")
