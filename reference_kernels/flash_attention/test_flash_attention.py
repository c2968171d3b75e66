"""The kernel's tests, made from its specs: ``pytest reference_kernels/flash_attention``."""

from __future__ import annotations

from reference_kernels.flash_attention import spec

test_flash_attention = spec.SPEC.test()
test_flash_attention_packed = spec.PACKED.test()
