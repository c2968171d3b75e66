"""A tensor as its bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from pytest_fusion.bench.concrete_calls import _same
from pytest_fusion.bench.output_digest import golden_of
from pytest_fusion.canary.offline.kernel import bytes_of
from pytest_fusion.run.bits import as_bytes

ONE = torch.arange(10.0).as_strided((1,), (5,), 5)
LAYOUTS = {
    "whole": ((2, 3), (3, 1), 0),
    "part": ((2, 3), (3, 1), 5),
    "transposed": ((2, 3), (1, 2), 1),
    "expanded": ((2, 3), (0, 1), 1),
    "gaps": ((2, 3), (7, 2), 0),
    "one of an odd stride": ((1,), (5,), 5),
    "several of an odd stride": ((1, 2), (9, 1), 2),
    "scalar": ((), (), 3),
    "empty": ((0, 3), (3, 1), 0),
    "empty at the end": ((0,), (1,), 16),
}
DTYPES = [torch.bool, torch.uint16, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
FLOATS8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]


def made(dtype: torch.dtype, layout: str) -> torch.Tensor:
    memory = torch.arange(16 * dtype.itemsize, dtype=torch.uint8)
    return (memory % 2 if dtype is torch.bool else memory).view(dtype).as_strided(*LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES + FLOATS8, ids=str)
def test_bytes_are_those_in_memory_in_logical_order(dtype: torch.dtype, layout: str) -> None:
    """Of every dtype, layout and size they are what the storage holds, element after element."""
    t = made(dtype, layout)
    memory, size = bytes(t.untyped_storage()), t.element_size()
    places = itertools.product(*map(range, t.shape))
    starts = (t.storage_offset() + sum(i * s for i, s in zip(place, t.stride(), strict=True)) for place in places)
    assert bytes(as_bytes(t).tolist()) == b"".join(memory[start * size : (start + 1) * size] for start in starts)
    assert (as_bytes(t).dtype, as_bytes(t).dim()) == (torch.uint8, 1)


@pytest.mark.parametrize("layout", ["whole", "part", "one of an odd stride", "several of an odd stride", "scalar"])
def test_what_is_contiguous_is_not_copied(layout: str) -> None:
    """Every case compares its inputs so, and a copy of them would cost as much as reading them."""
    t = made(torch.float64, layout)
    assert as_bytes(t).data_ptr() == t.data_ptr()


def test_lazy_views_of_complex_numbers_are_as_computed() -> None:
    """Conjugates and their imaginary parts have the bytes of their values, not of the numbers that they view."""
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert as_bytes(conjugate).equal(as_bytes(torch.tensor([1 - 2j, 3 + 4j])))
    assert as_bytes(conjugate.imag).equal(as_bytes(torch.tensor([-2.0, 4.0])))


def test_a_tensor_with_a_graph_has_bytes() -> None:
    """They are no part of the graph."""
    found = as_bytes(torch.ones(1, requires_grad=True) * 2)
    assert (found.tolist(), found.requires_grad) == ([0, 0, 0, 64], False)


def test_one_element_of_an_odd_stride_is_read_everywhere() -> None:
    """It is contiguous to torch, and still no tensor that ``view`` shows as bytes."""
    with pytest.raises(RuntimeError, match="stride"):
        ONE.view(torch.uint8)
    five = torch.tensor([5.0])
    assert _same([ONE], [five])
    assert bytes_of(ONE) == bytes_of(five)
    assert golden_of("out", ONE).digest == golden_of("out", five).digest
