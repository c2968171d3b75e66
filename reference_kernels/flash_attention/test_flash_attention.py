"""The tests of flash_attention, made from its specs: ``pytest reference_kernels/flash_attention``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.flash_attention import spec

# Four launches of three nested loops and the gradients: a quarter of a second a case, so fewer of them.
test_flash_attention = settings(max_examples=60)(spec.SPEC.test())
test_flash_attention_packed = settings(max_examples=60)(spec.PACKED.test())
test_flash_attention_full = settings(max_examples=60)(spec.FULL.test())
