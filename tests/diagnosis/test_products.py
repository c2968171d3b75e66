"""Kernels that follow what somebody set torch's products to, and kernels that are wrong whatever it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pytest_fusion import dim, tensor, values
from pytest_fusion.diagnosis.diagnose import diagnose

T = torch.Tensor
INPUTS = {"x": tensor("m k", values=values.normal()), "w": tensor("k n", values=values.normal())}
SIZES = {"dim m": 9, "dim k": 17, "dim n": 11}


def reference(x: T, w: T) -> T:
    return x @ w


def _coarse(t: T) -> T:
    """The 10 bits that TF32 keeps."""
    return (t.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


def as_set(x: T, w: T) -> T:
    """As cuBLAS has it, and kernels that ask torch whether TF32 is allowed."""
    if torch.get_float32_matmul_precision() == "highest":
        return torch.mm(x, w)
    return torch.mm(_coarse(x.contiguous()), _coarse(w.contiguous()))


def always(x: T, w: T) -> T:
    return torch.mm(_coarse(x.contiguous()), _coarse(w.contiguous()))


@pytest.fixture
def high() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def diagnosed(lab_of: Any, fused: Any) -> Any:
    bounds = {"m": dim(1), "k": dim(1), "n": dim(1)}
    return diagnose(lab_of(fused, reference, INPUTS, SIZES, dims=bounds, dtypes="float32"))


def test_what_somebody_set_is_named(lab_of: Any, high: None) -> None:
    """The line to look for stands in the evidence, as it is written."""
    found = diagnosed(lab_of, as_set)
    assert found.cause == "shortened-products", found
    assert found.evidence == ['right without torch.set_float32_matmul_precision("high"), for 3 seeds']


def test_a_kernel_that_is_wrong_without_it_too_is_not_excused(lab_of: Any, high: None) -> None:
    """A kernel that always keeps 10 bits has another cause, and the setting is listed as ruled out."""
    found = diagnosed(lab_of, always)
    assert found.cause not in ("shortened-products", "unexplained"), found
    assert 'what products are set to: wrong without torch.set_float32_matmul_precision("high") too' in found.ruled_out


@pytest.mark.slow
def test_where_nothing_is_set_nothing_is_asked(lab_of: Any) -> None:
    """Torch's defaults are no choice: the rule takes no run and rules out nothing."""
    found = diagnosed(lab_of, always)
    assert found.cause not in ("shortened-products", "unexplained"), found
    assert not any("products are set" in line for line in found.ruled_out)
