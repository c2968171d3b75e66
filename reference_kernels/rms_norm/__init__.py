"""RMS normalisation over the last dimension, alone or of a residual sum, in three conventions; with gradients."""

from reference_kernels.rms_norm.kernel import add_rms_norm, rms_norm
from reference_kernels.rms_norm.reference import (
    add_rms_norm_reference,
    gemma_reference,
    llama_reference,
    rms_norm_reference,
    torch_reference,
)

__all__ = [
    "add_rms_norm",
    "add_rms_norm_reference",
    "gemma_reference",
    "llama_reference",
    "rms_norm",
    "rms_norm_reference",
    "torch_reference",
]
