"""The kernel's tests, made from its specs: ``pytest reference_kernels/sampling``."""

from __future__ import annotations

from reference_kernels.sampling import spec

test_sample = spec.SPEC.test()
test_sample_by_row = spec.BY_ROW.test()
