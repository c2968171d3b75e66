"""Linear layers: bias and activation, three projections at once, the gated half of a feed-forward layer, low-rank
adaptation."""

from reference_kernels.linear.gate_up import gate_up_linear
from reference_kernels.linear.kernel import linear
from reference_kernels.linear.lora import lora_linear
from reference_kernels.linear.qkv import qkv_linear
from reference_kernels.linear.reference import (
    gate_up_linear_reference,
    linear_reference,
    lora_linear_reference,
    qkv_linear_reference,
)

__all__ = [
    "gate_up_linear",
    "gate_up_linear_reference",
    "linear",
    "linear_reference",
    "lora_linear",
    "lora_linear_reference",
    "qkv_linear",
    "qkv_linear_reference",
]
