"""The tests of rope, made from its specs: ``pytest reference_kernels/rope``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.rope import spec

test_rope = spec.SPEC.test()
test_rope_full = settings(max_examples=20)(spec.FULL.test())
test_rope_any_rank = settings(max_examples=80)(spec.RANKS.test())
test_rope_cache = settings(max_examples=100)(spec.CACHE.test())
test_rope_cache_float8 = settings(max_examples=60)(spec.CACHE_FLOAT8.test())
test_rope_cache_full = settings(max_examples=20)(spec.CACHE_FULL.test())
