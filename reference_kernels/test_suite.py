"""The suite's own tests, made from the specs: ``pytest reference_kernels``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.linear import spec as linear

test_linear = linear.SPEC.test()
# Outputs of 2080 x 2080 and more: half a second a case, so fewer of them.
test_linear_large = settings(max_examples=40)(linear.LARGE.test())
