"""The kernel's tests, made from its specs: ``pytest reference_kernels/glu``."""

from __future__ import annotations

from reference_kernels.glu import spec

test_glu = spec.SPEC.test()
test_glu_packed = spec.PACKED.test()
test_feed_forward = spec.FEED_FORWARD.test()
