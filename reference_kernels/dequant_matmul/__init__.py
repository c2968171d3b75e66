"""Linear layers whose weights are int8, int4 or float8 codes with scales, read as they are and never expanded."""

from reference_kernels.dequant_matmul.codes import pack_int4, quantise_fp8, quantise_int4, quantise_int8, unpack_int4
from reference_kernels.dequant_matmul.kernel import fp8_linear, int4_linear, int8_linear
from reference_kernels.dequant_matmul.reference import (
    fp8_linear_reference,
    int4_linear_reference,
    int8_linear_reference,
)

__all__ = [
    "fp8_linear",
    "fp8_linear_reference",
    "int4_linear",
    "int4_linear_reference",
    "int8_linear",
    "int8_linear_reference",
    "pack_int4",
    "quantise_fp8",
    "quantise_int4",
    "quantise_int8",
    "unpack_int4",
]
