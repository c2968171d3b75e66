"""Rotary position embedding of queries and keys in one launch, with gradients."""

from reference_kernels.rope.kernel import rope
from reference_kernels.rope.reference import rope_reference

__all__ = ["rope", "rope_reference"]
