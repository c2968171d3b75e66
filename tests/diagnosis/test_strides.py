"""Strides of 0 that are ignored, beside strides that are ignored where no other could be asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion import tensor
from pytest_fusion.diagnosis.diagnose import diagnose
from tests.diagnosis.wrong import PLAIN, ROWS, assumes_rows_far_apart, double, laid

T = torch.Tensor
ONLY_EXPANDED = {"x": tensor("rows hidden", layouts=("contiguous", "expanded"))}


def reads_on(x: T) -> T:
    """Reads as many elements as there are from where the tensor begins, and the last again if there are too few."""
    there = x.untyped_storage().size() // x.element_size() - x.storage_offset()
    flat = torch.as_strided(x, (there,), (1,), x.storage_offset())
    return double(flat[torch.arange(x.numel()).clamp(max=there - 1)].reshape(x.shape)) if x.numel() else double(x)


def of_few_rows(x: T) -> T:
    if x.shape[0] > 4:
        raise ValueError("no more than 4 rows")
    return assumes_rows_far_apart(x)


def of_few_rows_or_refused(x: T) -> T:
    """Refuses whatever is neither contiguous nor expanded."""
    if not x.is_contiguous() and x.stride(0):
        raise ValueError("rows apart")
    return assumes_rows_far_apart(x)


@pytest.mark.parametrize(
    ("fused", "inputs", "cause"),
    [
        (reads_on, ONLY_EXPANDED, "ignores-strides"),
        (reads_on, ROWS, "ignores-strides"),
        (of_few_rows_or_refused, ROWS, "ignores-strides"),
        (of_few_rows, ROWS, "ignores-zero-stride"),
        (assumes_rows_far_apart, ROWS, "ignores-zero-stride"),
    ],
    ids=["none asked", "others wrong", "others refused", "others right in few rows", "others right"],
)
def test_a_stride_of_0_is_named_where_others_were_right(lab_of: Any, fused: Any, inputs: Any, cause: str) -> None:
    """What no other layout was asked about says nothing of a stride of 0; few rows count where more are refused."""
    refused = {"rejects": ValueError} if fused in (of_few_rows, of_few_rows_or_refused) else {}
    lab = lab_of(fused, double, inputs, PLAIN, change=laid("expanded"), dtypes="float32", **refused)
    found = diagnose(lab)
    assert found.cause == cause, found
    unasked = inputs is ONLY_EXPANDED or fused is of_few_rows_or_refused
    assert ("no layout of x but expanded could be judged" in found.evidence) == unasked
