"""``bench=``: the cases that it names, their text, and what is wrong with entries that name none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_fusion import FusionSpec, SpecError, dim, tensor
from pytest_fusion.bench.entries import entries, text_of


def spec(bench: Any, **more: Any) -> FusionSpec:
    inputs = {"x": tensor("*batch n"), "w": tensor("n"), "eps": 1e-6}
    return FusionSpec(name="scale", fused=scale, reference=scale, inputs=inputs, bench=bench, **more)


def scale(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    return x * w + eps


def test_an_entry_is_a_case_of_its_very_sizes() -> None:
    """Contiguous, of ordinary values, the same in every run; sizes past what a test draws are as good as others."""
    (found,) = entries(spec([{"batch": (8192,), "n": 16384, "dtype": torch.float16}]))

    assert found.text == "batch=8192 n=16384 float16"
    assert (found.case.sizes, found.case.dtype) == ({"batch": (8192,), "n": 16384}, "float16")
    assert all(one.layout.plain and one.regime == "unit" for one in found.case.tensors.values())
    assert entries(spec([{"batch": (8192,), "n": 16384, "dtype": torch.float16}])) == [found]


def test_a_size_may_exceed_what_is_drawn() -> None:
    """`dim(16, 64)` keeps a test small; an entry may be larger, and no smaller."""
    (found,) = entries(spec([{"batch": (3,), "n": 8192}], dims={"n": dim(16, 64)}))
    assert found.case.sizes == {"batch": (3,), "n": 8192}
    (found,) = entries(spec([{"batch": (1 << 40, 1 << 20), "n": 1 << 20}], dims={"n": dim(16, 64)}))
    assert found.case.sizes == {"batch": (1 << 40, 1 << 20), "n": 1 << 20}
    with pytest.raises(SpecError, match="does not admit"):
        entries(spec([{"batch": (3,), "n": 8}], dims={"n": dim(16, 64)}))


def test_an_integer_is_a_batch_of_one_dimension() -> None:
    """As the text of an entry shows it; `4096` and `(4096,)` are one case."""
    (found,) = entries(spec([{"batch": 4096, "n": 8}]))
    assert (found.case.sizes, found.text) == ({"batch": (4096,), "n": 8}, "batch=4096 n=8 bfloat16")


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [((torch.float32, torch.float16, torch.bfloat16), "bfloat16"), ((torch.float32, torch.float16), "float16")],
)
def test_without_a_dtype_it_is_that_of_practice(dtypes: Any, expected: str) -> None:
    """The first of bfloat16, float16, float32 that the spec takes, and the text says which."""
    (found,) = entries(spec([{"batch": (4, 2), "n": 8}], dtypes=dtypes))
    assert (found.case.dtype, found.text) == (expected, f"batch=4x2 n=8 {expected}")


@pytest.mark.parametrize(
    ("bench", "said"),
    [
        ([{"batch": (8,), "m": 8}], "bench= has 'm'; known: batch, dtype, n"),
        ([{"batch": (8,)}], "leaves sizes open; add 'n': ..."),
        ([(8, 8)], "expected a list of dicts"),
        ([{"batch": (8,), "n": 8}, {"batch": (8,), "n": 8}], "names the case batch=8 n=8 bfloat16 twice"),
        ([{"batch": (8,), "n": 8, "dtype": torch.float64}], "not one of dtypes="),
        ([{"batch": "8", "n": 8}], "bench(batch='8'); expected a tuple of whole numbers"),
        ([{"batch": (8,), "n": -1}], "bench(n=-1); expected a whole number of 0 or more"),
    ],
)
def test_an_entry_that_names_no_case_is_an_error(bench: Any, said: str) -> None:
    """With what is wrong and what would be right."""
    with pytest.raises(SpecError, match="scale: ") as caught:
        entries(spec(bench))
    assert said in str(caught.value)


def test_a_size_that_the_spec_fixes_need_not_be_given() -> None:
    """``dims={"n": 64}`` leaves nothing open."""
    (found,) = entries(spec([{"batch": (8,)}], dims={"n": dim(64, 64)}))
    assert found.case.sizes == {"batch": (8,), "n": 64}


def test_the_text_names_sizes_first_and_the_dtype() -> None:
    """In the order of the entry, as baselines know it."""
    assert text_of({"dtype": torch.bfloat16, "rows": 3, "causal": True}) == "rows=3 causal=True bfloat16"


def test_no_entries_are_no_cases() -> None:
    """A spec without ``bench=`` is not measured."""
    assert entries(spec([])) == []
