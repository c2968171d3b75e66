"""The kernel's tests, made from its specs: ``pytest reference_kernels/adamw``."""

from __future__ import annotations

from reference_kernels.adamw import spec

test_adamw = spec.SPEC.test()
test_adamw_masters = spec.MASTERS.test()
test_adamw_strided_gradients = spec.STRIDED.test()
test_adamw_full = spec.FULL.test()
