"""The tests of adamw, made from its specs: ``pytest reference_kernels/adamw``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.adamw import spec

test_adamw = spec.SPEC.test()
# The spec above draws what both share; of what differs here fewer cases, for the suite has four minutes on two cores.
test_adamw_masters = settings(max_examples=80)(spec.MASTERS.test())
test_adamw_strided_gradients = settings(max_examples=80)(spec.STRIDED.test())
test_adamw_full = spec.FULL.test()
