"""The tests of softmax, made from its specs: ``pytest reference_kernels/softmax``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.softmax import spec

test_softmax = spec.SPEC.test()
test_softmax_batched = spec.BATCHED.test()
# Seven rounds of Philox a call, and one more call to see the mask: fewer cases of it.
test_softmax_attention = settings(max_examples=60)(spec.ATTENTION.test())
test_softmax_long = spec.LONG.test()
