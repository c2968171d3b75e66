"""Sampling of the next token: repetition penalty, temperature, top-k, top-p and a seeded draw, without a sort."""

from reference_kernels.sampling.kernel import sample
from reference_kernels.sampling.reference import sampling_probabilities

__all__ = ["sample", "sampling_probabilities"]
