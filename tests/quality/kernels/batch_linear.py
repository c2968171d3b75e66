# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""``x @ weight.T`` by rows: float32 sums over the inner dimension in steps, one rounding at the end.

``x`` is ``(rows, inner)``, ``weight`` ``(cols, inner)``; the result is ``(rows, cols)`` and each row has the same bits
in whatever batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

STEP = 4


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float().T).to(x.dtype)


@triton.jit
def linear_kernel(
    x, weight, partial, cols, inner, chunk, x_row, x_col, weight_row, weight_col, partial_split,
    COLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    c = tl.arange(0, COLS)[:, None]
    total = tl.zeros([COLS], tl.float32)
    end = tl.minimum(split * chunk + chunk, inner)
    for start in range(split * chunk, end, STEP):
        k = (start + tl.arange(0, STEP))[None, :]
        a = tl.load(x + row * x_row + k * x_col, mask=k < end, other=0.0).to(tl.float32)
        inside = (c < cols) & (k < end)
        w = tl.load(weight + c * weight_row + k * weight_col, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(a * w, axis=1)
    each = tl.arange(0, COLS)
    tl.store(partial + split * partial_split + row * cols + each, total, mask=each < cols)


def linear(x: Tensor, weight: Tensor, *, bug: str = "") -> Tensor:
    rows, inner = x.shape
    cols = weight.shape[0]
    splits = 2
    if bug == "splits-by-rows":
        # As many splits as keep the cores busy: few rows, many splits (FlashMLA #212).
        splits = 4 if rows < 8 else 1
    partial = torch.empty((splits, rows, cols), dtype=torch.float32, device=x.device)
    chunk = triton.cdiv(triton.cdiv(inner, splits), STEP) * STEP
    if rows and cols:
        linear_kernel[(rows, splits)](
            x, weight, partial, cols, inner, chunk, *x.stride(), *weight.stride(), partial.stride(0),
            COLS=triton.next_power_of_2(cols), STEP=STEP,
        )  # fmt: skip
    total = partial[0]
    for split in range(1, splits):
        total = total + partial[split]
    if bug == "scale-of-the-batch":
        # Exact in float32 for a power of two, but for what over- or underflows; the rounding afterwards is not.
        largest = x.float().abs().nan_to_num(0.0, 0.0, 0.0).amax() if x.numel() else torch.ones((), device=x.device)
        unit = torch.where(largest > 0, largest, 1.0) / 3.0
        return ((total / unit) * unit).to(x.dtype)
    return total.to(x.dtype) if x.dtype != torch.float32 else total.clone()


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, bug=bug)

    return FusionSpec(
        name=f"batch_linear {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("rows inner"), "weight": tensor("cols inner")},
        dims={"rows": dim(0, 20), "cols": dim(0, 4), "inner": dim(32, 128)},
        invariant="rows",
    )
