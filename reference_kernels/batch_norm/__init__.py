"""Batch normalisation, in training and evaluation, with a residual and relu; with gradients."""

from reference_kernels.batch_norm.kernel import batch_norm
from reference_kernels.batch_norm.reference import batch_norm_reference

__all__ = ["batch_norm", "batch_norm_reference"]
