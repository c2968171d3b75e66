"""RMS normalisation over the last dimension in the Llama, Gemma and torch casting conventions."""

from reference_kernels.rms_norm.kernel import rms_norm
from reference_kernels.rms_norm.reference import gemma_reference, llama_reference, torch_reference

__all__ = ["gemma_reference", "llama_reference", "rms_norm", "torch_reference"]
