"""How softmax is tested: any rank and layout, masks with rows that keep nothing, rows past one tile."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, optional, tensor
from reference_kernels.softmax.kernel import softmax
from reference_kernels.softmax.reference import softmax_reference


def _keep(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Two thirds of the elements, in nine rows of ten; nothing at all in the tenth."""
    device = generator.device
    elements = torch.rand(shape, generator=generator, device=device) < 2 / 3
    rows = torch.rand((*shape[:-1], 1), generator=generator, device=device) < 0.9
    return (elements & rows).to(dtype)


SCALE = st.sampled_from((1.0, 0.125, -2.0))

SPEC = FusionSpec(
    name="softmax",
    fused=softmax,
    reference=softmax_reference,
    inputs={
        "x": tensor("*batch n"),
        "scale": SCALE,
        "keep": optional(tensor("*batch n", dtype=torch.bool, values=_keep)),
        "bias": optional(tensor("n")),
    },
    max_launches=1,
    bench=[{"batch": (8192,), "n": 8192}],
)

BATCHED = FusionSpec(
    name="softmax_batched",
    fused=softmax,
    reference=softmax_reference,
    inputs={
        "x": tensor("rows n"),
        "scale": 0.125,
        "keep": optional(tensor("n", dtype=torch.bool, values=_keep)),
        "bias": optional(tensor("rows n", dtype=torch.float32)),
    },
    invariant="rows",
    max_launches=1,
)

# Interpreted tiles hold 128 columns, so the two specs above loop there; on a GPU only rows past 16384 do.
LONG = FusionSpec(
    name="softmax_long",
    fused=softmax,
    reference=softmax_reference,
    inputs={"x": tensor("rows n"), "keep": optional(tensor("rows n", dtype=torch.bool, values=_keep))},
    dims={"rows": dim(0, 8), "n": dim(16385, 40000)},
    max_launches=1,
    requires="cuda",
)

SPECS = [SPEC, BATCHED, LONG]
