"""The tests of decode_attention, made from its specs: ``pytest reference_kernels/decode_attention``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.decode_attention import spec

test_decode_attention = settings(max_examples=60)(spec.SPEC.test())
test_decode_attention_paged = settings(max_examples=60)(spec.PAGED.test())
test_decode_attention_float8 = settings(max_examples=60)(spec.FLOAT8.test())
test_decode_attention_full = settings(max_examples=40)(spec.FULL.test())
test_decode_attention_full_paged = settings(max_examples=40)(spec.FULL_PAGED.test())
