"""The specs of linear_cross_entropy: any rank and layout, every option, chunks, gradients at either time."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, derived, dim, optional, tensor, values
from reference_kernels.linear_cross_entropy.kernel import linear_cross_entropy
from reference_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference


def _labels(x: torch.Tensor, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Any class in four rows of five, -100 in the fifth."""
    shape, device = x.shape[:-1], x.device
    label = torch.randint(len(weight), shape, generator=generator, device=device)
    return label.masked_fill(torch.rand(shape, generator=generator, device=device) < 0.2, -100)


def _chunk_rows(x: torch.Tensor, generator: torch.Generator) -> int | None:
    """All at once, or chunks of 16 rows; of thousands of rows 33 chunks: 257, with gradients, took half of a test."""
    chunked = float(torch.rand((), generator=generator, device=generator.device)) < 0.5
    return max(16, x.shape[:-1].numel() // 32) if chunked else None


OPTIONS = {
    "label_smoothing": st.sampled_from((0.0, 0.1)),
    "z_loss": st.sampled_from((0.0, 0.01)),
    "softcap": st.sampled_from((None, 3.0)),
}
# Near overflow a float32 logit is rounded by 1e11 and more: whether equal rows of a weight give equal logits is then up
# to which of them torch.mm adds up in vectors, and so is all of the loss. NaN and infinities have tests of their own.
FINITE = values.finite()
PLAIN = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}
# Of a batch of hundreds of rows chunks of 4 were up to 250 launches a call, half of the seconds of the test.
CHUNKS = st.sampled_from((None, 16))
SIZES = {"batch": (8192,), "hidden": 4096, "vocab": 128256, "bias": None}

SPEC = FusionSpec(
    name="linear_cross_entropy",
    fused=linear_cross_entropy,
    reference=linear_cross_entropy_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("*batch hidden", values=FINITE),
        "weight": tensor("vocab hidden", values=FINITE),
        "target": derived(_labels),
        "bias": optional(tensor("vocab", values=FINITE)),
        **OPTIONS,
        "reduction": st.sampled_from(("mean", "sum", "none")),
        "chunk_rows": CHUNKS,
    },
    dims={"vocab": dim(1, 140), "hidden": dim(0, 40)},
    grad=("x", "weight", "bias"),
)

# Not float16, whose range needs the upstream gradient first.
FORWARD = FusionSpec(
    name="linear_cross_entropy_forward",
    fused=linear_cross_entropy,
    reference=linear_cross_entropy_reference,
    malformed=True,
    strict=True,
    inputs={
        **SPEC.inputs,
        "reduction": st.sampled_from(("mean", "sum")),
        "chunk_rows": derived(_chunk_rows),
        "gradients": "forward",
    },
    dims=SPEC.dims,
    dtypes=(torch.float32, torch.bfloat16),
    grad=("x", "weight", "bias"),
)

# Rows of any length, and what is measured.
FULL, FULL_FORWARD = (
    spec.with_(
        name=f"{spec.name}_full",
        inputs={**spec.inputs, "chunk_rows": CHUNKS},
        dims={"vocab": dim(1)},
        requires="cuda",
        bench=[{**SIZES, **PLAIN, "reduction": "mean", "chunk_rows": None}],
    )
    for spec in (SPEC, FORWARD)
)

SPECS = [SPEC, FORWARD, FULL, FULL_FORWARD]
