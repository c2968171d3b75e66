"""Layer normalisation over the last dimension, alone or of a residual sum; with gradients."""

from reference_kernels.layer_norm.kernel import add_layer_norm, layer_norm
from reference_kernels.layer_norm.reference import add_layer_norm_reference, layer_norm_reference

__all__ = ["add_layer_norm", "add_layer_norm_reference", "layer_norm", "layer_norm_reference"]
