"""Slopes of activations, which a kernel may take by another formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle import judging


def test_the_slope_of_logsigmoid_may_be_taken_from_1() -> None:
    """``1 - sigmoid(x)`` is off by a rounding of 1, where 1e-6 is left of it; four times that much is not allowed."""
    x = torch.linspace(5, 14, 400)

    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(True)
            return torch.autograd.grad(F.logsigmoid(leaf).sum(), leaf)[0]

    assert judging.judged(1 - torch.sigmoid(x), lambda: slope(x), 0)
    assert not judging.judged(1 - torch.sigmoid(x) + 2.0**-22, lambda: slope(x), 0)
