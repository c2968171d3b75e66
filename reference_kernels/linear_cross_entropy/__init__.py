"""Cross-entropy of a linear layer's outputs that never exist all at once; with gradients."""

from reference_kernels.linear_cross_entropy.kernel import linear_cross_entropy
from reference_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]
