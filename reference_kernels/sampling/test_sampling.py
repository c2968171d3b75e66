"""The tests of sampling, made from its specs: ``pytest reference_kernels/sampling``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.sampling import spec

# Some cases are drawn again at many seeds, which takes as many calls as all the others.
test_sample = settings(max_examples=60)(spec.SPEC.test())
test_sample_by_row = settings(max_examples=60)(spec.BY_ROW.test())
test_sample_full = settings(max_examples=40)(spec.FULL.test())
