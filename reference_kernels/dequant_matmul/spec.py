"""The specs of dequant_matmul: every code, any layout, tails of rows, columns and depth, sums in one part and more."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, dim, tensor, values
from reference_kernels.dequant_matmul.kernel import fp8_linear, int4_linear, int8_linear
from reference_kernels.dequant_matmul.reference import (
    fp8_linear_reference,
    int4_linear_reference,
    int8_linear_reference,
)

HALVES = (torch.float16, torch.bfloat16)
SCALE = (torch.float32, torch.bfloat16)
SCALES = values.positive(0.01, 2.0)
FP8 = torch.float8_e4m3fn
ROWS = (1, 16, 512)
# Interpreted tiles hold 32 rows of the weight, 8 to 32 of the input and 16 to 128 products.
DIMS = {"rows": dim(0, 70), "k": dim(0, 500), "n": dim(0, 70)}

SPEC = FusionSpec(
    name="int8_linear",
    fused=int8_linear,
    reference=int8_linear_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("rows k"),
        "codes": tensor("n k", dtype=torch.int8, values=values.integers(-128, 127)),
        "scales": tensor("n", dtype=SCALE, values=SCALES),
    },
    dims=DIMS,
    dtypes=HALVES,
    max_launches=3,
)

# Every word is four codes.
INT4 = FusionSpec(
    name="int4_linear",
    fused=int4_linear,
    reference=int4_linear_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("rows 64*groups"),
        "packed": tensor("n 16*groups", dtype=torch.int16, values=values.integers(-32768, 32767)),
        "scales": tensor("n groups", dtype=SCALE, values=SCALES),
        "group": 64,
    },
    dims={"rows": DIMS["rows"], "groups": dim(0, 3), "n": DIMS["n"]},
    dtypes=HALVES,
    max_launches=2,
)

WIDE_INT4 = INT4.with_(
    name="int4_linear_groups_of_128",
    inputs={
        "x": tensor("rows 128*groups"),
        "packed": tensor("n 32*groups", dtype=torch.int16, values=values.integers(-32768, 32767)),
        "scales": tensor("n groups", dtype=SCALE, values=SCALES),
        "group": 128,
    },
    dims={},
    requires="cuda",
    bench=[{"rows": rows, "groups": 64, "n": 28672} for rows in ROWS],
)

FLOAT8 = FusionSpec(
    name="fp8_linear",
    fused=fp8_linear,
    reference=fp8_linear_reference,
    malformed=True,
    strict=True,
    inputs={
        "x": tensor("rows k", dtype=FP8, values=values.normal()),
        "codes": tensor("n k", dtype=FP8, values=values.normal()),
        "x_scales": tensor("rows 1", dtype=torch.float32, values=SCALES),
        "scales": tensor("n", dtype=torch.float32, values=SCALES),
        "dtype": st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    },
    dims=DIMS,
    max_launches=2,
)

# Rows of whole 16 bytes have descriptors; on a GPU more than 64 rows take them.
DESCRIBED = FLOAT8.with_(
    name="fp8_linear_described",
    dims={"rows": DIMS["rows"], "k": dim(16, 496, multiple_of=16), "n": dim(8, 72, multiple_of=8)},
)

# On a GPU more than 64 rows take another tile, and sums past 1024 may be parts.
WIDE_INT8 = SPEC.with_(
    name="int8_linear_of_any_size",
    dims={},
    requires="cuda",
    bench=[{"rows": rows, "k": 8192, "n": 28672} for rows in ROWS],
)
WIDE_FLOAT8 = FLOAT8.with_(
    name="fp8_linear_of_any_size",
    dims={},
    requires="cuda",
    bench=[{"rows": 8192, "k": 8192, "n": 8192, "dtype": torch.bfloat16}],
)

SPECS = [SPEC, INT4, FLOAT8, DESCRIBED, WIDE_INT8, WIDE_INT4, WIDE_FLOAT8]
