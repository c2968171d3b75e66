"""Gating of a mixture of experts: softmax over the experts, the k best of them and their weights, with gradients."""

from reference_kernels.moe_gate.kernel import moe_gate
from reference_kernels.moe_gate.reference import moe_gate_reference

__all__ = ["moe_gate", "moe_gate_reference"]
