"""The tests of cross_entropy, made from its specs: ``pytest reference_kernels/cross_entropy``."""

from __future__ import annotations

from reference_kernels.cross_entropy import spec

test_cross_entropy = spec.SPEC.test()
test_cross_entropy_rows = spec.ROWS.test()
test_cross_entropy_long = spec.LONG.test()
