"""A softmax from the log-sum-exp, as kernels that save it have it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.oracle.judging import judged


@pytest.mark.parametrize("size", [1.0, 100.0, 1e5, 1e17])
def test_a_softmax_may_be_taken_from_the_log_sum_exp(size: float) -> None:
    """exp(x - lse), as Liger's fused_ce_tvd has it: of large scores no more is left of the sum than rounding keeps."""
    x = size * torch.randn(40, 32, generator=torch.Generator().manual_seed(2))
    x[:, 5] = x[:, 9] = x.amax(-1)
    lse = torch.logsumexp(x, -1, keepdim=True)
    share, coarse = torch.exp(x - lse), torch.exp(x - lse.bfloat16())

    def softmax() -> Tensor:
        return torch.softmax(x, -1)

    assert judged(share, softmax, 0)
    assert not judged(2 * share, softmax, 0)
    assert not judged(torch.full_like(x, torch.nan), softmax, 0)
    assert size > 1e5 or not judged(coarse, softmax, 0)
