"""Uneven integers as causes, and inputs that cure a failure once they are neutral; beside their look-alikes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from pytest_fusion import dim, tensor, values
from pytest_fusion.diagnosis.diagnose import diagnose
from pytest_fusion.diagnosis.experiments import Lab
from pytest_fusion.diagnosis.rules import neutral, uneven

T = torch.Tensor

COUNTED: dict[str, Any] = {
    "bins": tensor("vocab"),
    "index": tensor("n", dtype=torch.int64, values=values.indices("vocab")),
}
ROUTED: dict[str, Any] = {
    "bins": tensor("vocab"),
    "index": tensor("n slots", dtype=torch.int64, values=values.routing("vocab")),
}
CROWDED = {"dim vocab": 3, "dim n": 12, "choice index": 3, "dim slots": 2}
SOME = {"vocab": dim(3), "n": dim(0, 200), "slots": dim(1, 3)}


def counts(bins: T, index: T) -> T:
    return torch.bincount(index.flatten(), minlength=len(bins)).to(bins.dtype)


def counts_to_eight(bins: T, index: T) -> T:
    """No index counts more than eight times."""
    return counts(bins, index).clamp(max=8)


def counts_to_half(bins: T, index: T) -> T:
    """No index counts more often than half of what there is."""
    return counts(bins, index).clamp(max=index.numel() // 2)


def counts_without_repeats(bins: T, index: T) -> T:
    return counts(bins, index).clamp(max=1)


def counts_the_first_eight(bins: T, index: T) -> T:
    return counts(bins, index.flatten()[:8])


def counts_of_unequal(bins: T, index: T) -> T:
    """Nothing where all indices are equal."""
    return counts(bins, index) * float(bool((index != index.flatten()[:1]).any()))


def of(lab_of: Any, fused: Any, inputs: dict[str, Any], **keywords: Any) -> Lab:
    dims = {name: bound for name, bound in SOME.items() if name != "slots" or inputs is ROUTED}
    choice = {name: level for name, level in CROWDED.items() if name != "dim slots" or inputs is ROUTED}
    return lab_of(fused, counts, inputs, {**choice, **keywords}, dims=dims, dtypes="float32")  # type: ignore[no-any-return]


@pytest.mark.parametrize("inputs", [COUNTED, ROUTED], ids=["indices", "routing"])
def test_a_capacity_is_named_with_its_number(lab_of: Any, inputs: dict[str, Any]) -> None:
    """Also where no row has one expert twice; the rule decides alone."""
    lab = of(lab_of, counts_to_eight, inputs, **({"choice index": 2} if inputs is ROUTED else {}))
    found = diagnose(lab)
    assert found.cause == "capacity-overflow", found
    assert found.evidence[0] == "wrong where one element of index occurs 9 times or more, right up to 8"


@pytest.mark.parametrize("fused", [counts_to_half, counts_without_repeats, counts_the_first_eight])
def test_what_is_no_capacity_is_not_named_so(lab_of: Any, fused: Any) -> None:
    """A share of all, repeats of any number, and a limit of the size whatever the indices."""
    lab = of(lab_of, fused, COUNTED)
    assert uneven.capacity(lab) is None
    assert any("no number of equal elements of index" in line for line in lab.ruled_out)


def test_a_capacity_without_room_is_not_judged(lab_of: Any) -> None:
    """With one row there are no other indices to spread the rest over."""
    lab = lab_of(counts_to_eight, counts, COUNTED, {"dim vocab": 1, "dim n": 12}, dims={"vocab": dim(1, 1)})
    assert uneven.capacity(lab) is None


def test_the_kinds_that_show_it_are_named(lab_of: Any) -> None:
    """Those that are right too, the even one among them."""
    found = diagnose(of(lab_of, counts_of_unequal, COUNTED))
    assert found.cause == "uneven-data", found
    right = "right where it is 'even' or 'zipf' or 'sorted' or 'runs' or 'gaps' or 'ends' or 'once'"
    assert found.evidence == [f"wrong where index is 'hot' or 'equal', {right}"]


def test_a_larger_case_names_the_kinds_that_a_small_one_cannot(lab_of: Any) -> None:
    """A single index is like all others, of whatever kind."""
    found = uneven.kind(of(lab_of, counts_of_unequal, COUNTED, **{"choice index": 0, "dim n": 1}))
    assert found is not None
    assert found.evidence[0].startswith("wrong where index is 'hot' or 'equal', right where it is 'even' or ")


def test_where_even_data_fail_too_the_kinds_are_evidence_alone(lab_of: Any) -> None:
    """Even ones repeat by chance, and only those that never do are right: the cause stays open."""
    lab = of(lab_of, counts_without_repeats, COUNTED)
    assert uneven.kind(lab) is None
    found = neutral.curing(lab)
    assert found is not None
    assert found.cause == "unexplained"
    assert found.evidence[0].endswith("right where it is 'once'")


PACKED: dict[str, Any] = {
    "x": tensor("total", values=values.normal()),
    "bounds": tensor("sequences+1", dtype=torch.int32, values=values.offsets("total")),
}


def sums(x: T, bounds: T) -> T:
    return torch.stack([x[first:end].sum() for first, end in itertools.pairwise(bounds.tolist())])


def sums_but_of_whole_blocks(x: T, bounds: T) -> T:
    return torch.where((bounds.diff() % 8 == 0) & (bounds.diff() > 0), 0.0, sums(x, bounds))


def sums_but_of_long_ones(x: T, bounds: T) -> T:
    return torch.where(bounds.diff() > 2 * len(x) / (len(bounds) - 1), 0.0, sums(x, bounds))


@pytest.mark.parametrize(
    ("fused", "total", "sequences", "cause"),
    [(sums_but_of_whole_blocks, 8, 1, None), (sums_but_of_long_ones, 12, 3, "uneven-data")],
)
def test_a_length_that_even_sequences_have_too_is_no_kind(
    lab_of: Any, fused: Any, total: int, sequences: int, cause: str | None
) -> None:
    """Even sequences of the larger case are too short to show what a whole block does."""
    choice = {"dim total": total, "dim sequences": sequences, "choice bounds": 5}
    dims = {"total": dim(0, 300), "sequences": dim(1, 12)}
    found = uneven.kind(lab_of(fused, sums, PACKED, choice, dims=dims, dtypes="float32"))
    assert (found.cause if found is not None else None) == cause, found


DECAYED = {"x": tensor("n"), "decay": st.sampled_from([0.0, 0.5]), "bias": tensor("n")}


def decayed(x: T, decay: float, bias: T) -> T:
    return x * x + decay * x.abs() + bias


def grown(x: T, decay: float, bias: T) -> T:
    return x * x - decay * x.abs() + bias


def without_bias_below_zero(x: T, decay: float, bias: T) -> T:
    return x * x + decay * x.abs() + bias.clamp(min=0)


def without_bias(x: T, decay: float, bias: T) -> T:
    return x * x + decay * x.abs()


def off(x: T, decay: float, bias: T) -> T:
    return decayed(x, decay, bias) + 1


@pytest.mark.parametrize(
    ("fused", "evidence"),
    [
        (grown, ["wrong only where decay is not 0"]),
        (without_bias, ["wrong only where bias is not 0"]),
        (without_bias_below_zero, ["wrong only where bias is not 0"]),
        (off, None),
    ],
)
def test_an_input_that_cures_it_is_evidence(lab_of: Any, fused: Any, evidence: list[str] | None) -> None:
    """A number, a tensor; nothing cures what is wrong everywhere."""
    pools = {"decay": (0.0, 0.5)}
    lab = lab_of(fused, decayed, DECAYED, {"dim n": 5, "drawn decay": 1}, pools=pools, dtypes="float32")
    found = neutral.curing(lab)
    assert (found.evidence if found is not None else None) == evidence


def test_one_element_that_cures_it_is_evidence(lab_of: Any) -> None:
    """The one that is above 0.6; nothing is reported where several are."""

    def more_above(x: T) -> T:
        return torch.where(x > 0.6, x + 1, x)

    seen = set()
    for size in (3, 5, 8):
        lab = lab_of(more_above, lambda x: x, {"x": tensor("n")}, {"dim n": size}, dtypes="float32")
        above = [place for place, value in enumerate(lab.attempt(lab.base).probe.logical["x"]) if value > 0.6]
        found = neutral.curing(lab)
        assert (found is not None) is (len(above) == 1)
        assert found is None or found.evidence[0].startswith(f"right once element {above[0]} of x is 0 in place of ")
        seen.add(len(above) == 1)
    assert seen == {True, False}
