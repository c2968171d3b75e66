"""How dequant_matmul is tested: every code, any layout, tails of rows, columns and depth, sums in one part and more."""

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

INT8 = FusionSpec(
    name="int8_linear",
    fused=int8_linear,
    reference=int8_linear_reference,
    inputs={
        "x": tensor("*batch k"),
        "codes": tensor("n k", dtype=torch.int8, values=values.integers(-128, 127)),
        "scales": tensor("n", dtype=SCALE, values=SCALES),
    },
    dtypes=HALVES,
    max_launches=2,
    bench=[{"batch": (rows,), "k": 8192, "n": 28672} for rows in ROWS],
)

# Every byte is two codes.
INT4 = FusionSpec(
    name="int4_linear",
    fused=int4_linear,
    reference=int4_linear_reference,
    inputs={
        "x": tensor("*batch 32*groups"),
        "packed": tensor("n 16*groups", dtype=torch.uint8, values=values.integers(0, 255)),
        "scales": tensor("n groups", dtype=SCALE, values=SCALES),
        "group": 32,
    },
    dims={"groups": dim(0, 5)},
    dtypes=HALVES,
    max_launches=2,
)

WIDE_INT4 = INT4.with_(
    name="int4_linear_groups_of_128",
    inputs={
        "x": tensor("rows 128*groups"),
        "packed": tensor("n 64*groups", dtype=torch.uint8, values=values.integers(0, 255)),
        "scales": tensor("n groups", dtype=SCALE, values=SCALES),
        "group": 128,
    },
    dims={"rows": dim(0, 600), "groups": dim(0, 20)},
    requires="cuda",
    bench=[{"rows": rows, "groups": 64, "n": 28672} for rows in ROWS],
)

FLOAT8 = FusionSpec(
    name="fp8_linear",
    fused=fp8_linear,
    reference=fp8_linear_reference,
    inputs={
        "x": tensor("rows k", dtype=FP8, values=values.normal()),
        "codes": tensor("n k", dtype=FP8, values=values.normal()),
        "x_scales": tensor("rows 1", dtype=torch.float32, values=SCALES),
        "scales": tensor("n", dtype=torch.float32, values=SCALES),
        "dtype": st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    },
    max_launches=2,
    bench=[{"rows": 8192, "k": 8192, "n": 8192, "dtype": torch.bfloat16}],
)

SPECS = [INT8, INT4, WIDE_INT4, FLOAT8]
