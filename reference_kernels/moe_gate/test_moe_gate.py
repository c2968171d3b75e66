"""The tests of moe_gate, made from its specs: ``pytest reference_kernels/moe_gate``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.moe_gate import spec

test_moe_gate = spec.SPEC.test()
test_moe_gate_any_rank = settings(max_examples=80)(spec.RANKS.test())
