"""Scaled, masked softmax over the last dimension, in one pass over memory."""

from reference_kernels.softmax.kernel import softmax
from reference_kernels.softmax.reference import softmax_reference

__all__ = ["softmax", "softmax_reference"]
