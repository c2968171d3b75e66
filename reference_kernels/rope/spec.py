"""The specs of rope: any rank and layout, whole and partial heads, tables shared by a batch, with gradients; and
caches of any layout, slots in any order, padding, float8."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, derived, dim, optional, tensor, values
from reference_kernels.rope.cache import rope_cache
from reference_kernels.rope.kernel import rope
from reference_kernels.rope.reference import rope_cache_reference, rope_reference

LAYOUT = st.sampled_from(("half", "interleaved"))
ANGLES = (torch.float32, torch.bfloat16)
# Interpreted programs take 256 pairs, so heads of this number and size are already more than one program's.
DIMS = {"q_heads": dim(0, 10), "k_heads": dim(0, 10), "half": dim(0, 40), "rest": dim(0, 40)}

SPEC = FusionSpec(
    name="rope",
    fused=rope,
    reference=rope_reference,
    malformed=True,
    strict=True,
    inputs={
        "q": tensor("batch tokens q_heads 2*half+rest"),
        "k": tensor("batch tokens k_heads 2*half+rest"),
        "cos": tensor("tokens half", dtype=ANGLES),
        "sin": tensor("tokens half", dtype=ANGLES),
        "layout": LAYOUT,
    },
    dims={"batch": dim(0, 4), "tokens": dim(0, 64), **DIMS},
    grad=("q", "k"),
    invariant="tokens",
    max_launches=1,
)

# Few cases of any size, and those that are measured.
FULL = SPEC.with_(
    name="rope_full",
    dims={"half": dim(0, 256), "rest": dim(0, 512)},  # a head has at most 1024 dimensions
    bench=[
        {"batch": batch, "tokens": 4096, "q_heads": 32, "k_heads": 8, "half": 64, "rest": 0, "layout": "half"}
        for batch in (8, 4)
    ],
)

RANKS = FusionSpec(
    name="rope_any_rank",
    fused=rope,
    reference=rope_reference,
    malformed=True,
    strict=True,
    inputs={
        "q": tensor("*batch q_heads 2*half"),
        "k": tensor("*batch k_heads 2*half"),
        "cos": tensor("*batch half", dtype=ANGLES),
        "sin": tensor("*batch half", dtype=ANGLES),
        "layout": LAYOUT,
    },
    dims={name: DIMS[name] for name in ("q_heads", "k_heads", "half")},
    grad=("q", "k"),
    max_launches=1,
)


def _slots(generator: torch.Generator, tokens: int, pages: int, page_size: int) -> torch.Tensor:
    """Different slots in any order; about one token in five has none, nor have those for which there is no room."""
    device = generator.device
    order = torch.randperm(pages * page_size, generator=generator, device=device)[:tokens]
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    slots[: len(order)] = order
    return torch.where(torch.rand(tokens, generator=generator, device=device) < 0.2, -1, slots)


CACHE = FusionSpec(
    name="rope_cache",
    fused=rope_cache,
    reference=rope_cache_reference,
    malformed=True,
    strict=True,
    inputs={
        "q": tensor("tokens q_heads 2*half+rest"),
        "k": tensor("tokens k_heads 2*half+rest"),
        "v": tensor("tokens k_heads 2*half+rest"),
        "cos": tensor("tokens half", dtype=ANGLES),
        "sin": tensor("tokens half", dtype=ANGLES),
        "k_cache": tensor("pages page_size k_heads 2*half+rest"),
        "v_cache": tensor("pages page_size k_heads 2*half+rest"),
        "slots": derived(_slots),
        "layout": LAYOUT,
        "checked": False,  # on a GPU the check waits for the device
    },
    dims={"tokens": dim(0, 24), **DIMS, "pages": dim(0, 6), "page_size": dim(0, 9)},
    mutates=("k_cache", "v_cache"),
    max_launches=1,
)

CACHE_FLOAT8 = CACHE.with_(
    name="rope_cache_float8",
    inputs={
        **CACHE.inputs,
        **{
            name: tensor("pages page_size k_heads 2*half+rest", dtype=torch.float8_e4m3fn, values=values.normal())
            for name in ("k_cache", "v_cache")
        },
        **{
            name: optional(tensor("k_heads", dtype=torch.float32, values=values.positive(0.1, 2.0)))
            for name in ("k_scale", "v_scale")
        },
    },
)


def _slots_of_batch(generator: torch.Generator, batch: int, tokens: int, pages: int, page_size: int) -> torch.Tensor:
    return _slots(generator, batch * tokens, pages, page_size).to(torch.int32).view(batch, tokens)


# Few cases of any size and two leading dimensions, and those that are measured.
CACHE_FULL = CACHE.with_(
    name="rope_cache_full",
    inputs={
        **CACHE.inputs,
        "q": tensor("batch tokens q_heads 2*half+rest"),
        "k": tensor("batch tokens k_heads 2*half+rest"),
        "v": tensor("batch tokens k_heads 2*half+rest"),
        "slots": derived(_slots_of_batch),
    },
    dims=FULL.dims,
    bench=[
        {"batch": batch, "tokens": tokens, "q_heads": 32, "k_heads": 8, "half": 64, "rest": 0, "layout": "half"}
        | {"pages": pages, "page_size": 16}
        for batch, tokens, pages in ((8, 4096, 2560), (64, 1, 4096))
    ],
)

SPECS = [SPEC, FULL, RANKS, CACHE, CACHE_FLOAT8, CACHE_FULL]
