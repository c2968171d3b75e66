"""Rotary position embedding of queries and keys in one launch, with gradients; and with the write into a cache."""

from reference_kernels.rope.cache import rope_cache
from reference_kernels.rope.kernel import rope
from reference_kernels.rope.reference import rope_cache_reference, rope_reference

__all__ = ["rope", "rope_cache", "rope_cache_reference", "rope_reference"]
