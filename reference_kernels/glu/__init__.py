"""Gated linear units: an activated gate times its other half, SwiGLU and GeGLU, with gradients."""

from reference_kernels.glu.kernel import glu, glu_packed
from reference_kernels.glu.reference import glu_packed_reference, glu_reference

__all__ = ["glu", "glu_packed", "glu_packed_reference", "glu_reference"]
