"""The tests of rms_norm, made from its specs: ``pytest reference_kernels/rms_norm``."""

from __future__ import annotations

from reference_kernels.rms_norm import spec

test_rms_norm = spec.SPEC.test()
test_add_rms_norm = spec.ADD.test()
test_rms_norm_long = spec.LONG.test()
