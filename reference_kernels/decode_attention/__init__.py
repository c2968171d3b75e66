"""Attention of one query a sequence over a cache of keys and values, contiguous or in pages."""

from reference_kernels.decode_attention.kernel import decode_attention
from reference_kernels.decode_attention.reference import decode_attention_reference

__all__ = ["decode_attention", "decode_attention_reference"]
