"""The kernel's tests, made from its specs: ``pytest reference_kernels/rope``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.rope import spec

test_rope = spec.SPEC.test()
test_rope_full = settings(max_examples=20)(spec.FULL.test())
test_rope_any_rank = spec.RANKS.test()
