"""Copies of a call's tensors, and the comparison of two results."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pytest_fusion.canary.live.calls.arguments import names_of
from pytest_fusion.canary.live.calls.copies import CannotCopyError, copies_of
from pytest_fusion.canary.live.comparing.pending import FIELDS, compare
from pytest_fusion.spec.promises import Tolerance


def _kernel(x: Tensor, rest: object = None, *, out: object = None) -> None: ...


_NAMES = names_of(_kernel)


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(24.0)[3::2],
        torch.arange(3.0).expand(4, 3),
        torch.arange(400, dtype=torch.float16)[301:],
        torch.empty(0, 3),
        torch.tensor(2.0),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)[:, 1:],
    ],
    ids=["transposed", "strided", "expanded", "offset", "empty", "scalar", "bf16"],
)
def test_a_copy_is_the_same_tensor_elsewhere(x: Tensor) -> None:
    """Values, shape, strides and alignment are the original's, and its memory is not."""
    (copy,) = copies_of((x,), {}, _NAMES, most_bytes=1e6).args

    assert torch.equal(copy, x)
    assert (copy.shape, copy.stride(), copy.dtype) == (x.shape, x.stride(), x.dtype)
    if x.numel():
        assert copy.data_ptr() != x.data_ptr()
        assert copy.data_ptr() % 16 == (x.data_ptr() - x.untyped_storage().data_ptr()) % 16


def test_tensors_that_share_memory_share_it_in_the_copy() -> None:
    """A write through one argument is seen through the other, as it would be in the call."""
    base = torch.zeros(10)
    copies = copies_of((base[:6],), {"rest": [base[4:]], "out": {"same": base}}, _NAMES, most_bytes=1e6)

    copies.args[0][5] = 3
    assert copies.kwargs["rest"][0][1] == 3
    assert copies.kwargs["out"]["same"][5] == 3
    assert base[5] == 0


def test_what_may_not_be_copied_is_refused_before_any_copy() -> None:
    """Too many bytes, and layouts without strides."""
    with pytest.raises(CannotCopyError, match=r"would need 0\.00381 MiB"):
        copies_of((torch.zeros(1000),), {}, _NAMES, most_bytes=3999)
    with pytest.raises(CannotCopyError, match="x is not a plain strided tensor"):
        copies_of((torch.eye(3).to_sparse(),), {}, _NAMES, most_bytes=1e6)


def test_restoring_touches_the_elements_alone() -> None:
    """What another thread wrote between the elements of a view stays, and no version counter moves."""
    base = torch.arange(12.0)
    view, wide = base[::2], torch.arange(3.0).expand(4, 3)
    copies = copies_of((view, wide), {}, _NAMES, most_bytes=1e6)
    base.fill_(-1)
    wide[0].fill_(9)
    version = base._version

    copies.restore()

    assert torch.equal(base[::2], torch.arange(12.0)[::2])
    assert torch.equal(base[1::2], torch.full((6,), -1.0))
    assert torch.equal(wide[3], torch.arange(3.0))
    assert base._version == version


def test_only_the_named_arguments_are_copied() -> None:
    """The others are handed on as they are."""
    x, rest = torch.zeros(3), torch.zeros(3)
    copies = copies_of((x, rest), {}, _NAMES, only=("rest",), most_bytes=1e6)

    assert copies.args[0] is x
    assert copies.args[1] is not rest
    assert [pair.name for pair in copies.pairs] == ["rest"]


def _row(one: Tensor, other: Tensor, tolerance: Tolerance | None = None) -> dict[str, float]:
    (sums,) = compare(one, other, tolerance)
    return dict(zip(FIELDS, sums.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_one_rounding_apart_is_within_what_is_allowed(dtype: torch.dtype) -> None:
    """An honest kernel that rounds to the neighbour everywhere, near zero too, has nothing beyond."""
    x = torch.linspace(-3, 3, 1001, dtype=torch.float64)
    eps = torch.finfo(dtype).eps
    row = _row(x.to(dtype), (x * (1 + eps / 2)).to(dtype))
    assert (row["beyond"], row["nonfinite"], row["elements"]) == (0, 0, 1001)


@pytest.mark.parametrize("shape", [(3_000_000,), (3, 1_000_000), (1, 1, 2_500_000), ()])
def test_one_wrong_element_is_found_wherever_it_is(shape: tuple[int, ...]) -> None:
    """The last element of an output larger than a piece of the comparison."""
    one = torch.ones(shape)
    other = one.clone()
    other.view(-1)[-1] = 1.5
    row = _row(one, other)
    assert (row["beyond"], row["elements"]) == (1, one.numel())
    assert row["worst"] > 1000


def test_nonfinite_values_must_be_the_same() -> None:
    """NaN is NaN and inf is inf of one sign; else the element counts as nonfinite."""
    one = torch.tensor([math.nan, math.inf, -math.inf, 1.0, math.inf, 0.0])
    other = torch.tensor([math.nan, math.inf, -math.inf, math.nan, -math.inf, 0.0])
    row = _row(one, other)
    assert (row["beyond"], row["nonfinite"]) == (0, 2)
    assert math.isfinite(row["worst"])


def test_integers_are_equal_or_within_a_stated_tolerance() -> None:
    """Codes that differ by one are beyond, unless it was said that they may."""
    one, other = torch.tensor([1, 2, 3], dtype=torch.int8), torch.tensor([1, 2, 4], dtype=torch.int8)
    assert _row(one, other)["beyond"] == 1
    assert _row(one, other, Tolerance(atol=1))["beyond"] == 0
    assert _row(one > 2, other > 1)["beyond"] == 1
    assert _row(torch.complex(one.float(), one.float()), torch.complex(one.float(), other.float()))["beyond"] == 1


def test_structures_are_compared_without_the_device() -> None:
    """Nesting, shapes, dtypes and plain values that differ are said in words."""
    x = torch.ones(2)
    for one, other in [((x, x), x), ({"a": x}, {"b": x}), (x, None), ((x, 3), (x, 4)), (x, x.half()), (x, x[None])]:
        assert isinstance(compare(one, other, None), str)
    assert not isinstance(compare({"a": (x, None, 1.0)}, {"a": (x, None, 1.0)}, None), str)
