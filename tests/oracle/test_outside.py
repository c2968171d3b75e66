"""References whose numbers leave torch: what became of them is priced by a guess, and said."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from pytest_fusion.oracle import run_lanes
from tests.oracle.judging import judged

X = torch.randn(40, 30, generator=torch.Generator().manual_seed(3))


def _by_numpy(x: Tensor) -> Tensor:
    a = x.float().numpy()
    e = np.exp(a - a.max(-1, keepdims=True))
    return torch.from_numpy(e / e.sum(-1, keepdims=True)).to(x.dtype)


def _by_list(x: Tensor) -> Tensor:
    return torch.tensor([[math.exp(math.sin(v)) for v in row] for row in x.tolist()], dtype=x.dtype)


def _by_number(x: Tensor) -> Tensor:
    return (x.float() / (x.float().norm().item() + 1e-6)).to(x.dtype)


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {"numpy": _by_numpy, "tolist": _by_list, "item": _by_number}
WITHIN: dict[str, Callable[[Tensor], Tensor]] = {
    "numpy": lambda x: torch.softmax(x.flip(-1).float(), -1).flip(-1).to(x.dtype),
    "tolist": lambda x: torch.exp(torch.sin(x.float())).to(x.dtype),
    "item": lambda x: (x.float() * (x.float().square().sum(0).sum() + 1e-12).rsqrt()).to(x.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REFERENCES)
def test_the_same_within_torch_passes(name: str, dtype: torch.dtype) -> None:
    """An honest kernel passes beside such a reference, and one that is off by a part in 10,000 or 50 does not."""
    x = X.to(dtype)

    found = run_lanes(lambda: [REFERENCES[name](x)], seed=1)

    right = WITHIN[name](x)
    wrong = right * (1.0001 if dtype == torch.float32 else 1.02)
    assert [name in note for note in found.fallbacks] == [True]
    assert judged(right, lambda: REFERENCES[name](x), seed=1)
    assert not judged(wrong, lambda: REFERENCES[name](x), seed=1)


def test_numbers_as_they_were_given_cost_nothing() -> None:
    """An input read as a number, lengths in a list, and what an operator does inside are no reason for a guess."""
    scale, lengths = torch.tensor(0.37), torch.tensor([10, 20, 10])

    def reference() -> list[Tensor]:
        return [torch.cat([part * scale.item() for part in X.split(lengths.tolist())]), _numpy_within(X)]

    found = run_lanes(reference, seed=1)

    assert not any("outside" in note for note in found.fallbacks)
    assert float((found.outputs[0].lanes - found.outputs[0].oracle).abs().max()) == 0


@torch.library.custom_op("pytest_fusion_tests::numpy_within", mutates_args=())
def _numpy_within(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


@pytest.mark.slow
def test_a_compiled_reference_runs_as_it_was_written() -> None:
    """Dynamo does not trace the lanes' own code, and what was compiled is followed operation by operation."""
    compiled = torch.compile(lambda x: torch.softmax(x * 1.1, -1), backend="eager")

    found = run_lanes(lambda: [compiled(X)], seed=1)

    assert found.fallbacks == ()
    torch.testing.assert_close(found.outputs[0].oracle, torch.softmax(X.double() * 1.1, -1), rtol=1e-12, atol=0)
