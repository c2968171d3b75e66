"""Pointwise chains: relu with scale and bias by column, add-multiply-activation, seeded dropout; with gradients."""

from reference_kernels.pointwise.kernel import add_mul_act, relu_scale_bias
from reference_kernels.pointwise.reference import add_mul_act_reference, dropout_reference, relu_scale_bias_reference
from reference_kernels.pointwise.seeded_dropout import dropout

__all__ = [
    "add_mul_act",
    "add_mul_act_reference",
    "dropout",
    "dropout_reference",
    "relu_scale_bias",
    "relu_scale_bias_reference",
]
