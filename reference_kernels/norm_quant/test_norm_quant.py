"""The tests of norm_quant, made from its specs: ``pytest reference_kernels/norm_quant``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.norm_quant import spec

test_norm_quant = spec.SPEC.test()
test_add_norm_quant = spec.RESIDUAL.test()
test_norm_quant_any_rank = settings(max_examples=80)(spec.RANKS.test())
test_norm_quant_long = spec.LONG.test()
