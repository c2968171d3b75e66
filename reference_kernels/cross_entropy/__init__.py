"""Cross-entropy of logits against class labels, with label smoothing, z-loss and softcap; with gradients."""

from reference_kernels.cross_entropy.kernel import cross_entropy
from reference_kernels.cross_entropy.reference import cross_entropy_reference

__all__ = ["cross_entropy", "cross_entropy_reference"]
