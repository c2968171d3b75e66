"""The tests of batch_norm, made from its specs: ``pytest reference_kernels/batch_norm``."""

from __future__ import annotations

from hypothesis import settings

from reference_kernels.batch_norm import spec

test_batch_norm = spec.SPEC.test()
# The spec above draws what both share; of what differs here fewer cases, for the suite has four minutes on two cores.
test_batch_norm_channels_last = settings(max_examples=80)(spec.CHANNELS_LAST.test())
test_batch_norm_evaluation = spec.EVALUATION.test()
test_batch_norm_full = spec.FULL.test()
