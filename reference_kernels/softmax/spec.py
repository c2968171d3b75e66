"""The specs of softmax: any rank and layout, rows that keep nothing, a triangle, dropout; with gradients."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, optional, rng, tensor
from reference_kernels.softmax.kernel import softmax
from reference_kernels.softmax.reference import softmax_reference


def _keep(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Two thirds of the elements, in nine rows of ten; nothing at all in the tenth."""
    device = generator.device
    elements = torch.rand(shape, generator=generator, device=device) < 2 / 3
    rows = torch.rand((*shape[:-1], 1), generator=generator, device=device) < 0.9
    return (elements & rows).to(dtype)


def _kept(x: torch.Tensor, dropout_p: float, seed: int) -> torch.Tensor:
    """What dropout keeps, also of elements that another mask makes 0."""
    return softmax(torch.ones_like(x, dtype=torch.float32), dropout_p=dropout_p, seed=seed) != 0


SCALE = st.sampled_from((1.0, 0.125, -2.0))
WIDTHS = ((32768, 8192), (8192, 8192), (16384, 131072))

SPEC = FusionSpec(
    name="softmax",
    fused=softmax,
    reference=softmax_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("*batch n"),
        "scale": SCALE,
        "keep": optional(tensor("*batch n", dtype=torch.bool, values=_keep)),
        "bias": optional(tensor("n")),
    },
    grad=True,
    max_launches=1,
    bench=[
        *({"batch": (rows,), "n": n, "keep": None, "bias": None} for rows, n in WIDTHS),
        {"batch": (32768,), "n": 8192, "scale": 0.125, "bias": None},
    ],
)

BATCHED = FusionSpec(
    name="softmax_batched",
    fused=softmax,
    reference=softmax_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("rows n"),
        "scale": 0.125,
        "keep": optional(tensor("n", dtype=torch.bool, values=_keep)),
        "bias": optional(tensor("rows n", dtype=torch.float32)),
    },
    invariant="rows",
    max_launches=1,
)

# Attention scores: who is padding is known for each key of a sequence, a bias for each head.
ATTENTION = FusionSpec(
    name="softmax_attention",
    fused=softmax,
    reference=softmax_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("b heads q k"),
        "scale": SCALE,
        "keep": optional(tensor("b 1 1 k", dtype=torch.bool, values=_keep)),
        "bias": optional(tensor("heads q k")),
        "diagonal": st.sampled_from((None, 0, 3, -1)),
        "dropout_p": st.sampled_from((0.0, 0.1, 0.5, 1.0)),
        "seed": st.integers(0, 2**63 - 1),
    },
    grad=True,
    rng=rng("seed", recover=_kept),
    max_launches=1,
    bench=[
        {"b": 4, "heads": 32, "q": 2048, "k": 2048, "bias": None, "diagonal": 0, "dropout_p": p, "seed": 20261122}
        for p in (0.0, 0.1)
    ],
)

# Interpreted tiles hold 128 columns, so the specs above loop there; on a GPU rows past 8192 do backward, past 16384
# forward.
LONG = FusionSpec(
    name="softmax_long",
    fused=softmax,
    reference=softmax_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("rows n"),
        "keep": optional(tensor("rows n", dtype=torch.bool, values=_keep)),
        "bias": optional(tensor("n")),
        "diagonal": st.sampled_from((None, 9000)),
    },
    dims={"rows": dim(0, 8), "n": dim(8193, 40000)},
    grad=True,
    max_launches=1,
    requires="cuda",
)

SPECS = [SPEC, BATCHED, ATTENTION, LONG]
