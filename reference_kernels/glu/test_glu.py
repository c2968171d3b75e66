"""The tests of glu, made from its specs: ``pytest reference_kernels/glu``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.glu import spec

test_glu = spec.SPEC.test()
test_glu_packed = spec.PACKED.test()
# Its launches are those of gate_up_linear, linear and glu, each tested with all cases.
test_feed_forward = settings(max_examples=80)(spec.FEED_FORWARD.test())
