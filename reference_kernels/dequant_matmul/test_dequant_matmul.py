"""The tests of dequant_matmul, made from its specs: ``pytest reference_kernels/dequant_matmul``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.dequant_matmul import spec

test_int8_linear = spec.SPEC.test()
test_int4_linear = spec.INT4.test()
test_fp8_linear = spec.FLOAT8.test()
test_fp8_linear_described = settings(max_examples=40)(spec.DESCRIBED.test())
test_int8_linear_of_any_size = spec.WIDE_INT8.test()
test_int4_linear_groups_of_128 = spec.WIDE_INT4.test()
test_fp8_linear_of_any_size = spec.WIDE_FLOAT8.test()
