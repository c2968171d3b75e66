"""Derivatives of activation functions, as autograd calls them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.ops.pointwise import sigmoid, tanh
from pytest_fusion.oracle.ops.rule_registry import Op, pointwise


@pointwise("sigmoid_backward")
def _sigmoid(op: Op, grad: Tensor, output: Tensor) -> Tensor:
    return op.relative(grad * output * (1 - output), 3)


@pointwise("tanh_backward")
def _tanh(op: Op, grad: Tensor, output: Tensor) -> Tensor:
    # 1 - y * y cancels where tanh saturates: what is left is the rounding of the square.
    return op.relative(grad * op.absolute(1 - output * output, 1), 2)


@pointwise("silu_backward")
def _silu(op: Op, grad: Tensor, x: Tensor) -> Tensor:
    gate = sigmoid(op, x)
    return op.relative(grad * op.absolute(gate * (1 + x * (1 - gate)), 1), 3)


@pointwise("gelu_backward")
def _gelu(op: Op, grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        scale = math.sqrt(2 / math.pi)
        share = tanh(op, op.relative(scale * (x + 0.044715 * x**3), 4))
        slope = op.absolute(1 - share * share, 2) * scale * (1 + 3 * 0.044715 * x * x)
        return op.relative(grad * (op.absolute(0.5 * (1 + share), 1) + 0.5 * x * slope), 3)
    share = op.relative(torch.erf(op.relative(x * math.sqrt(0.5), 2)), 4)
    density = op.relative(torch.exp(-0.5 * op.relative(x * x, 2)), 4) / math.sqrt(2 * math.pi)
    return op.relative(grad * (op.absolute(0.5 * (1 + share), 1) + x * density), 3)


@pointwise("softplus_backward")
def _softplus(op: Op, grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    return torch.where(x * beta > threshold, grad, op.relative(grad * sigmoid(op, x * beta), 2))


@pointwise("log_sigmoid_backward")
def _log_sigmoid(op: Op, grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    # 1 - sigmoid(x) is the same, and rounds at the size of 1.
    return op.relative(grad * op.absolute(sigmoid(op, -x), 1), 2)
