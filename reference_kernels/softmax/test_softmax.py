"""The kernel's tests, made from its specs: ``pytest reference_kernels/softmax``."""

from __future__ import annotations

from reference_kernels.softmax import spec

test_softmax = spec.SPEC.test()
test_softmax_batched = spec.BATCHED.test()
test_softmax_attention = spec.ATTENTION.test()
test_softmax_long = spec.LONG.test()
