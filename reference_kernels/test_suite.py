"""The suite's own tests, made from the specs: ``pytest reference_kernels``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.linear import spec as linear
from reference_kernels.rms_norm import spec as rms_norm

test_rms_norm_llama = rms_norm.SPEC.test()
test_rms_norm_gemma = rms_norm.GEMMA.test()
test_rms_norm_torch = rms_norm.TORCH.test()
test_rms_norm_long = rms_norm.LONG.test()
test_linear = linear.SPEC.test()
# Outputs of 2080 x 2080 and more: half a second a case, so fewer of them.
test_linear_large = settings(max_examples=40)(linear.LARGE.test())
