"""The tests of pointwise, made from its specs: ``pytest reference_kernels/pointwise``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.pointwise import spec

test_relu_scale_bias = spec.SPEC.test()
test_relu_scale_bias_any_rank = settings(max_examples=80)(spec.RANKS.test())
test_add_mul_act = spec.ADD_MUL_ACT.test()
test_dropout = spec.DROPOUT.test()
