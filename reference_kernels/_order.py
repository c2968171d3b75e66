"""float32 as integers of the same order, for kernels that select: comparisons of integers are exact and total."""

from __future__ import annotations

import triton.language as tl

from reference_kernels._common import jit

# The key of -inf, and that of NaN, which `torch.sort` and `torch.topk` take for the largest of all.
LOWEST = tl.constexpr(-2139095041)
HIGHEST = tl.constexpr(2147483647)


@jit
def order_key(x: tl.tensor) -> tl.tensor:
    """int32 keys of float32 ``x``, in its order: equal for both zeros, and `HIGHEST` for every NaN."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), HIGHEST)


@jit
def of_order_key(key: tl.tensor) -> tl.tensor:
    """The float32 with this `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
