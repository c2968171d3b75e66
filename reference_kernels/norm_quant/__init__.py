"""Normalisation and quantisation in one pass: rms or layer norm, after a residual or not, to float8 or int8 codes."""

from reference_kernels.norm_quant.kernel import add_norm_quant, norm_quant
from reference_kernels.norm_quant.reference import add_norm_quant_reference, norm_quant_reference

__all__ = ["add_norm_quant", "add_norm_quant_reference", "norm_quant", "norm_quant_reference"]
