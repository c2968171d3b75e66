"""The tests of layer_norm, made from its specs: ``pytest reference_kernels/layer_norm``."""

from __future__ import annotations

from reference_kernels.layer_norm import spec

test_layer_norm = spec.SPEC.test()
test_add_layer_norm = spec.ADD.test()
test_layer_norm_long = spec.LONG.test()
