"""The tests of embedding, made from its specs: ``pytest reference_kernels/embedding``."""

from __future__ import annotations

from reference_kernels.embedding import spec

test_embedding_bag = spec.SPEC.test()
test_embedding_bag_unequal = spec.UNEQUAL.test()
test_dot_interaction = spec.INTERACTION.test()
