"""Functions of torch that compute otherwise where their inputs lie otherwise, and kernels that call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.spec.inputs import tensor

T = torch.Tensor
INPUTS = {"x": tensor("batch rows k"), "weight": tensor("n k"), "bias": tensor("n")}


def layer(x: T, weight: T, bias: T) -> T:
    """One sum where the bias is contiguous, else a product, rounded, and a sum."""
    return torch.relu(F.linear(x, weight, bias))


def fused_layer(x: T, weight: T, bias: T) -> T:
    return F.linear(x, weight, bias).clamp_min_(0)


def judged(judge_one: Any, fused: Callable[..., T], reference: Callable[..., T], layout: str, seed: int = 1) -> Any:
    tensors = {name: TensorCase("bfloat16") for name in ("x", "weight")}
    tensors["bias"] = TensorCase("bfloat16", Layout(layout))
    case = Case({"batch": 3, "rows": 5, "k": 33, "n": 40}, "bfloat16", tensors, seed=seed)
    return judge_one(fused, reference, INPUTS, case=case, dtypes="bfloat16")


@pytest.mark.parametrize("layout", ["contiguous", "step", "expanded"])
def test_a_layer_of_torch_beside_itself_is_right(judge_one: Any, layout: str) -> None:
    """Of a bias with a stride F.linear rounds once more, which its contiguous copy does not show."""
    result = judged(judge_one, fused_layer, layer, layout)
    assert result.failure is None, result.failure
    assert result.rejected is None


def rounded_twice(x: T, weight: T, bias: T) -> T:
    return (x @ weight.t()).add_(bias).clamp_min_(0)


def coarse(x: T, weight: T, bias: T) -> T:
    """As its reference, with a weight of 6 bits."""
    bits = weight.contiguous().view(torch.int16) & ~3
    return fused_layer(x, bits.view(torch.bfloat16), bias)


def found(result: Any) -> list[str]:
    """What `values` found, a hazard too."""
    return [verdict.status for verdict in result.verdicts if verdict.check == "values" and verdict.status != "pass"]


def test_where_the_layout_explains_nothing_the_rounding_counts(judge_one: Any) -> None:
    """The same two roundings beside a contiguous bias are one too many; with a stride nothing else is excused."""
    assert found(judged(judge_one, rounded_twice, layer, "contiguous")) == ["hazard"]
    assert found(judged(judge_one, rounded_twice, layer, "step")) == []
    assert found(judged(judge_one, coarse, layer, "step")) == ["fail"]


def test_a_reference_that_takes_no_strides_is_none_there(judge_one: Any) -> None:
    """Then contiguous copies alone say what is allowed."""
    tensors = {"x": TensorCase("float32", Layout("transposed"))}
    case = Case({"rows": 5, "hidden": 7}, "float32", tensors, seed=1)

    def viewed(x: T) -> T:
        return x.view(-1).square().view(x.shape)

    assert judge_one(lambda x: x * x, viewed, case=case).failure is None
    assert judge_one(lambda x: x * x * 1.0001, viewed, case=case).failure.check == "values"


def test_a_reference_that_ignores_strides_excuses_no_kernel_that_does(judge_one: Any) -> None:
    """It means other elements by a transposed input: what it gives there is no price."""
    tensors = {"x": TensorCase("float32", Layout("transposed"))}
    case = Case({"rows": 5, "hidden": 7}, "float32", tensors, seed=1)

    def of_storage(x: T) -> T:
        return x.as_strided(x.shape, (x.shape[1], 1)) * 2

    assert judge_one(of_storage, of_storage, case=case).failure.check == "values"
    assert judge_one(lambda x: x + x, of_storage, case=case).failure is None
