"""The tests of linear, made from its specs: ``pytest reference_kernels/linear``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.linear import spec

test_linear = spec.SPEC.test()
test_qkv_linear = spec.QKV.test()
test_gate_up_linear = spec.GATE_UP.test()
test_lora_linear = spec.LORA.test()
# The same kernels' other way to their operands.
test_linear_described = settings(max_examples=40)(spec.DESCRIBED.test())
test_qkv_linear_described = settings(max_examples=25)(spec.DESCRIBED_QKV.test())
test_lora_linear_described = settings(max_examples=25)(spec.DESCRIBED_LORA.test())
test_gate_up_linear_described = settings(max_examples=25)(spec.DESCRIBED_GATE_UP.test())
# Outputs of 2080 x 2080 and more: half a second a case, so fewer of them.
test_linear_large = settings(max_examples=40)(spec.LARGE.test())
test_linear_large_described = settings(max_examples=40)(spec.LARGE_DESCRIBED.test())
