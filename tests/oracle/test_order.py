"""Places of equal values: torch leaves open which it names, so lanes name others; all else about an order is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from pytest_fusion.oracle import run_lanes
from pytest_fusion.oracle.tolerance.codes import judge_codes
from tests.oracle.judging import judged

Ordering = Callable[[Tensor], Sequence[Tensor]]
ORDERINGS: dict[str, Ordering] = {
    "topk": lambda x: x.topk(3, -1),
    "topk of columns": lambda x: x.topk(2, 0),
    "sort": lambda x: x.sort(-1, descending=True),
    "kthvalue": lambda x: x.kthvalue(2, -1),
    "median": lambda x: x.median(-1, keepdim=True),
    "mode": lambda x: x.mode(0),
}
X = torch.tensor(
    [[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 2.0, 2.0, 0.0]]
)


@pytest.mark.parametrize("name", ORDERINGS)
def test_lanes_name_other_places_of_equal_values(name: str) -> None:
    """Each lane names a place with the value that it has; where values are equal not all lanes name the same one."""
    call = ORDERINGS[name]
    along = 0 if "columns" in name or name == "mode" else 1

    values, places = run_lanes(lambda: list(call(X)), lanes=6, seed=1).outputs

    keep = values.native.dim() == 2
    for lane in places.lanes:
        at = lane if keep else lane.unsqueeze(along)
        named = X.gather(along, at)
        assert torch.equal(named if keep else named.squeeze(along), values.native)
    assert bool((places.lanes != places.lanes[0]).any())
    assert bool((values.lanes == values.native).all())


def test_sorted_places_stay_a_permutation() -> None:
    """No lane names a place twice, also where sixty are equal and the lanes are six."""
    x = torch.tensor([1.0, 2.0, 2.0, float("nan"), float("nan")] + [3.0] * 60)

    places = run_lanes(lambda: [x.sort().indices], lanes=6, seed=1).outputs[0].lanes

    assert torch.equal(places.sort(-1).values, torch.arange(65).expand(6, 65))
    assert int((places[:, 3:63].amax(0) - places[:, 3:63].amin(0)).min()) > 30


def _by_bits(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Tensor, Tensor]:
    """As CUDA's radix sorts: NaN with a sign bit below all numbers."""
    key = torch.where(x.isnan() & x.signbit(), -torch.inf, x)
    places = key.argsort(dim=dim, descending=descending, stable=True)
    return x.gather(dim, places), places


def test_nan_with_a_sign_bit_may_come_first_or_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a sort of torch takes it for the least, the oracle has it as the largest, and lanes have both: a kernel may
    follow either. Rows without it have one order."""
    x = torch.tensor([[2.0, -torch.nan, 1.0], [3.0, 5.0, 4.0]])

    def reference(x: Tensor) -> list[Tensor]:
        return list(x.sort(dim=-1, descending=True, stable=True))

    largest, least = reference(x), _by_bits(x, descending=True)
    monkeypatch.setattr(torch, "sort", _by_bits)

    places = run_lanes(lambda: reference(x), lanes=8, seed=1).outputs[1]

    assert torch.equal(places.oracle.to(torch.int64), largest[1])
    assert judge_codes(largest[1], places).ok
    assert judge_codes(least[1], places).ok
    assert not judge_codes(torch.tensor([[1, 0, 2], [1, 0, 2]]), places).ok
    assert judged(largest[0], lambda: reference(x)[0], 1)
    assert judged(least[0], lambda: reference(x)[0], 1)
    assert not judged(least[0].roll(1, 0), lambda: reference(x)[0], 1)
    monkeypatch.undo()
    assert not judged(least[0], lambda: reference(x)[0], 1)
    places = run_lanes(lambda: reference(x), lanes=8, seed=1).outputs[1]
    assert not judge_codes(least[1], places).ok
    assert bool((places.lanes == places.native).all())


@pytest.mark.parametrize(
    "call", [lambda x: x.sort(dim=-1, stable=True).indices, lambda x: x.argmax(-1)], ids=["sort", "max"]
)
def test_what_torch_promises_is_exact(call: Callable[[Tensor], Tensor]) -> None:
    """A stable order, and the first of the largest, have one answer."""
    assert bool((run_lanes(lambda: [call(X)], seed=1).outputs[0].lanes == call(X)).all())


def test_the_last_of_equals_is_as_good_as_the_first() -> None:
    """An honest top-k that names other places of equal values passes, one that names another value does not."""
    found = run_lanes(lambda: [X.topk(2, -1).indices], lanes=6, seed=3).outputs[0]
    first = torch.tensor([[1, 2], [0, 1], [0, 1], [2, 3]])
    last = torch.tensor([[4, 2], [4, 3], [0, 1], [3, 2]])

    assert judge_codes(first, found).ok
    assert judge_codes(last, found).ok
    assert not judge_codes(torch.tensor([[1, 2], [0, 1], [0, 4], [2, 3]]), found).ok
