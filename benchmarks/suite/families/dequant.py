"""Products with quantised weights beside the same product in bfloat16."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import BF16, normal
from benchmarks.suite.model import Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.dequant_matmul import (
    fp8_linear,
    int4_linear,
    int8_linear,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    unpack_int4,
)

_CUBLAS, _SCALED = "cuBLAS, bfloat16", "_scaled_mm"
_GROUP = 128


def by_int8(device: torch.device, rows: int, n: int, k: int) -> Problem:
    x = normal(device, rows, k)
    codes, scales = quantise_int8(normal(device, n, k, scale=k**-0.5))
    whole = (codes.float() * scales[:, None]).to(BF16)
    return Problem(
        {"x": x, "codes": codes, "scales": scales, "whole": whole},
        lambda x, codes, scales, whole: int8_linear(x, codes, scales),
        lambda x, codes, scales, whole: F.linear(x, codes.to(x.dtype) * scales.to(x.dtype)[:, None]),
        Work(moved(x, codes, scales) + 2 * rows * n, 2 * rows * n * k),
        {_CUBLAS: Way(lambda x, codes, scales, whole: F.linear(x, whole))},
        compiles=None,
    )


def _unpacked(packed: torch.Tensor, scales: torch.Tensor, k: int, dtype: torch.dtype) -> torch.Tensor:
    codes: torch.Tensor = unpack_int4(packed, k, _GROUP)
    return codes.to(dtype) * scales.to(dtype).repeat_interleave(_GROUP, 1)[:, :k]


def by_int4(device: torch.device, rows: int, n: int, k: int) -> Problem:
    x = normal(device, rows, k)
    packed, scales = quantise_int4(normal(device, n, k, scale=k**-0.5), _GROUP)
    return Problem(
        {"x": x, "packed": packed, "scales": scales, "whole": _unpacked(packed, scales, k, BF16)},
        lambda x, packed, scales, whole: int4_linear(x, packed, scales, _GROUP),
        lambda x, packed, scales, whole: F.linear(x, _unpacked(packed, scales, k, x.dtype)),
        Work(moved(x, packed, scales) + 2 * rows * n, 2 * rows * n * k),
        {_CUBLAS: Way(lambda x, packed, scales, whole: F.linear(x, whole))},
        compiles=None,
    )


def by_float8(device: torch.device, rows: int, n: int, k: int) -> Problem:
    """Both sides in float8, a scale for each row of either."""
    x, x_scales = quantise_fp8(normal(device, rows, k))
    codes, scales = (each.reshape(n, -1) for each in quantise_fp8(normal(device, n, k, scale=k**-0.5)))
    scales = scales.reshape(n)
    wide_x, whole = (x.float() * x_scales).to(BF16), (codes.float() * scales[:, None]).to(BF16)

    def scaled(
        x: torch.Tensor, codes: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor, **_: object
    ) -> object:
        # Its accumulator in full precision, as ours.
        return torch._scaled_mm(x, codes.t(), x_scales, scales[None, :], out_dtype=BF16, use_fast_accum=False)

    others = {_SCALED: Way(scaled)} if device.type == "cuda" else {}
    return Problem(
        {"x": x, "codes": codes, "x_scales": x_scales, "scales": scales, "wide_x": wide_x, "whole": whole},
        lambda x, codes, x_scales, scales, wide_x, whole: fp8_linear(x, codes, x_scales, scales),
        lambda wide_x, whole, **_: F.linear(wide_x, whole),
        Work(moved(x, codes, x_scales, scales) + 2 * rows * n, 2 * rows * n * k),
        others,
        compiles=None,
    )


def _bars(rows: int, times: float, share: float) -> tuple[Bar, ...]:
    return (Bar(_CUBLAS, 0.65),) if rows > 16 else (Bar(_CUBLAS, times), Bar("copy", share))


_SMALL = {"n": 70, "k": 256}
_WIDE = {"n": 28672, "k": 8192}

ROWS = [
    *(
        Row(
            "dequant_matmul",
            f"{name}, {rows}x8192 by 28672",
            make,
            {"rows": rows, **_WIDE},
            {"rows": min(rows, 20), **_SMALL},
            bars(_bars(rows, times, share), *((Bar(_CUBLAS, 2.9, goal=True),) if name == "int4" and rows < 64 else ())),
        )
        for name, make, times, share in (("int8", by_int8, 1.5, 0.75), ("int4", by_int4, 2.2, 0.57))
        for rows in (1, 16, 512)
    ),
    Row(
        "dequant_matmul",
        "float8, 8192^3",
        by_float8,
        {"rows": 8192, "n": 8192, "k": 8192},
        {"rows": 20, **_SMALL},
        bars(Bar(_SCALED, 0.70), over(eager=1.2)),
    ),
]
