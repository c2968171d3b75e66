"""The kernel's tests, made from its specs: ``pytest reference_kernels/moe_gate``."""

from __future__ import annotations

from reference_kernels.moe_gate import spec

test_moe_gate = spec.SPEC.test()
test_moe_gate_any_rank = spec.RANKS.test()
