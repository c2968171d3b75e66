"""The tests of linear_cross_entropy, made from its specs: ``pytest reference_kernels/linear_cross_entropy``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.linear_cross_entropy import spec

test_linear_cross_entropy = spec.SPEC.test()
# Layouts and options are the other test's; what is its own is when the gradients are computed, and what of.
test_linear_cross_entropy_forward = settings(max_examples=60)(spec.FORWARD.test())
test_linear_cross_entropy_full = settings(max_examples=40)(spec.FULL.test())
test_linear_cross_entropy_forward_full = settings(max_examples=40)(spec.FULL_FORWARD.test())
