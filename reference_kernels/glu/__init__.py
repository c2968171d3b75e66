"""Gated linear units: an activated gate times its other half, SwiGLU and GeGLU; alone and in a feed-forward block; with
gradients."""

from reference_kernels.glu.block import feed_forward
from reference_kernels.glu.kernel import glu, glu_packed
from reference_kernels.glu.reference import feed_forward_reference, glu_packed_reference, glu_reference

__all__ = ["feed_forward", "feed_forward_reference", "glu", "glu_packed", "glu_packed_reference", "glu_reference"]
