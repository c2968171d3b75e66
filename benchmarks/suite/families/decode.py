"""Decoding: one query a sequence over a cache, contiguous and paged."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import BF16, normal
from benchmarks.suite.model import Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.decode_attention import decode_attention

_HEADS, _KV, _FEATURES = 64, 8, 128
SMALL = {"batch": 2, "capacity": 48}
_GATHER = "gather, then SDPA"
_DTYPES = {"bfloat16": BF16, "float8": torch.float8_e4m3fn}


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``q`` of ``(batch, heads, features)``; ``k`` and ``v`` as they lie in the cache."""
    found = F.scaled_dot_product_attention(q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)
    return found.squeeze(2)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _sdpa(q, k, v)


def contiguous(device: torch.device, batch: int, capacity: int, cache: str = "bfloat16") -> Problem:
    q = normal(device, batch, _HEADS, _FEATURES)
    dtype = _DTYPES[cache]
    k, v = (normal(device, batch, capacity, _KV, _FEATURES).to(dtype) for _ in range(2))
    lengths = torch.full((batch,), capacity, dtype=torch.int32, device=device)

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        return _sdpa(q, k.to(q.dtype), v.to(q.dtype))

    others = {}
    if cache == "bfloat16" and device.type == "cuda":
        others["SDPA flash"] = Way(lambda q, k, v, lengths: _flash(q, k, v))
    return Problem(
        {"q": q, "k": k, "v": v, "lengths": lengths},
        lambda q, k, v, lengths: decode_attention(q, k, v, lengths, checked=False)[0],
        eager,
        Work(moved(q, q, k, v)),
        others,
        compiles=None,
    )


def paged(device: torch.device, batch: int, capacity: int, page: int) -> Problem:
    """Every page once, in any order."""
    most = capacity // page
    q = normal(device, batch, _HEADS, _FEATURES)
    k, v = (normal(device, batch * most, page, _KV, _FEATURES) for _ in range(2))
    lengths = torch.full((batch,), capacity, dtype=torch.int32, device=device)
    table = torch.randperm(batch * most, device=device).view(batch, most).to(torch.int32)

    def gathered(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: torch.Tensor,  # noqa: ARG001
        table: torch.Tensor,
    ) -> torch.Tensor:
        k, v = (each[table.long()].flatten(1, 2) for each in (k, v))
        return _sdpa(q, k, v)

    return Problem(
        {"q": q, "k": k, "v": v, "lengths": lengths, "table": table},
        lambda q, k, v, lengths, table: decode_attention(q, k, v, lengths, table, checked=False)[0],
        None,
        Work(moved(q, q, k, v, table)),
        {_GATHER: Way(gathered)},
        compiles=None,
        truth=_GATHER,
    )


ROWS = [
    Row(
        "decode_attention",
        "64/8 heads, 64x8192x128",
        contiguous,
        {"batch": 64, "capacity": 8192},
        SMALL,
        bars(Bar("copy", 0.82), Bar("us", 609), over(eager=2.0), Bar("copy", 0.90, goal=True)),
    ),
    Row(
        "decode_attention",
        "pages of 16, 64/8 heads, 64x8192x128",
        paged,
        {"batch": 64, "capacity": 8192, "page": 16},
        {**SMALL, "page": 16},
        bars(Bar("copy", 0.78), Bar(_GATHER, 5.0), Bar("copy", 0.90, goal=True)),
    ),
    Row(
        "decode_attention",
        "64/8 heads, 1x131072x128",
        contiguous,
        {"batch": 1, "capacity": 131072},
        SMALL,
        bars(Bar("copy", 0.65), over(eager=2.0)),
    ),
    Row(
        "decode_attention",
        "float8 cache, 64/8 heads, 64x8192x128",
        contiguous,
        {"batch": 64, "capacity": 8192, "cache": "float8"},
        {**SMALL, "cache": "float8"},
        bars(Bar("copy", 0.78, goal=True), over(eager=2.0)),
    ),
]
