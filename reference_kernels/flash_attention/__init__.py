"""Attention whose scores never reach memory: causal, windowed, grouped heads, packed sequences; with gradients."""

from reference_kernels.flash_attention.kernel import flash_attention
from reference_kernels.flash_attention.reference import flash_attention_reference

__all__ = ["flash_attention", "flash_attention_reference"]
