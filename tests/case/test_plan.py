"""From choices of levels to cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_fusion import values
from pytest_fusion.case import regimes
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.case.plan import Plan, allowed_layouts, build, cost, refit
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.inputs import optional, tensor, unwrap

PlanOf = Callable[..., Plan]
FIXTURE = [HealthCheck.function_scoped_fixture]


def kinds(plan: Plan, name: str) -> set[str]:
    inner = unwrap(plan.spec.inputs[name])
    return {kind for kind, _ in allowed_layouts(plan.spec, name, inner)}  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None, suppress_health_check=FIXTURE)
@given(rows=st.integers(0, 9999), kv=st.integers(0, 300), heads=st.integers(0, 300), seed=st.integers(0, 2**31))
def test_a_built_case_is_within_bounds_and_limits(plan_of: PlanOf, rows: int, kv: int, heads: int, seed: int) -> None:
    """Whatever sizes are wished for, those of the case obey the bounds together and cost no more than allowed."""
    dims = {"heads": dim(1, 32, multiple_of="kv"), "rows": dim(2)}
    plan = plan_of({"x": tensor("rows heads kv")}, dims=dims)
    case = build(plan, {"dim rows": rows, "dim kv": kv, "dim heads": heads}, seed)
    assert case.sizes["rows"] >= 2  # type: ignore[operator]
    assert 1 <= case.sizes["heads"] <= 32  # type: ignore[operator]
    assert case.sizes["heads"] % case.sizes["kv"] == 0  # type: ignore[operator]
    assert cost(plan.spec, case)[0] <= plan.limits.elements
    assert refit(plan.spec, case.sizes) == dict(case.sizes)


def test_the_first_level_of_every_factor_is_the_plainest(plan_of: PlanOf) -> None:
    """A choice that says nothing is a float32 case of size 1 with contiguous tensors, everything present."""
    plan = plan_of({"x": tensor("*batch rows hidden"), "b": optional(tensor("hidden"))})
    case = build(plan, {}, 0)
    assert dict(case.sizes) == {"batch": (), "rows": 1, "hidden": 1}
    assert case.absent == ()
    assert case.dtype == "float32"
    assert all(entry.layout.plain and entry.regime == "unit" for entry in case.tensors.values())


def test_equal_choices_give_equal_cases_and_the_seed_picks_within_a_class(plan_of: PlanOf) -> None:
    """The seed chooses a size of the class; the same seed the same one."""
    plan = plan_of({"x": tensor("n")})
    sizes = {build(plan, {"dim n": "prime"}, seed).sizes["n"] for seed in range(40)}
    assert sizes == {2, 7, 11, 13, 19, 41}
    assert build(plan, {"dim n": "prime"}, 5) == build(plan, {"dim n": "prime"}, 5)


def test_a_batch_has_as_many_rows_as_other_dims(plan_of: PlanOf) -> None:
    """By class, around the kernel's blocks of rows but not of columns, or by number; of two dims for every other seed,
    and cut to the limits as any dim is."""
    plan = plan_of({"x": tensor("*batch n")}, blocks=(48, 4096))
    levels = plan.factors["dim batch"]
    assert levels[0] == ()
    assert {"power", "prime", "block+1", "blocks"} < set(levels)
    found = {build(plan, {"dim batch": "blocks"}, seed).sizes["batch"] for seed in range(60)}
    assert {(97,), (96,), (48, 2), (144,), (72, 2)} == found
    assert build(plan, {"dim batch": 1025}, 1).sizes["batch"] in ((1025,), (205, 5))
    case = build(plan, {"dim batch": 65537, "dim n": 160}, 1)
    assert cost(plan.spec, case)[0] <= plan.limits.elements
    assert min(math.prod(case.sizes["batch"]), case.sizes["n"]) > 30  # type: ignore[arg-type,type-var]


def test_what_the_kernel_writes_is_never_expanded(plan_of: PlanOf) -> None:
    """Inputs in ``mutates`` and ``clobbers`` have a place for each element, others may repeat theirs."""
    inputs = {"x": tensor("n m"), "y": tensor("n m"), "z": tensor("n m")}
    plan = plan_of(inputs, mutates="x", clobbers="y")
    assert "expanded" not in kinds(plan, "x") | kinds(plan, "y")
    assert "expanded" in kinds(plan, "z")


def test_values_with_a_constraint_are_not_repeated_unless_it_is_asked_for(plan_of: PlanOf) -> None:
    """A permutation of one element repeated is none, so it is not expanded; a layout that is named is drawn.

    Nor do lengths add up that are repeated, and the experts of a row are different.
    """
    function = lambda shape, dtype, generator: None  # noqa: E731
    plan = plan_of(
        {
            "p": tensor("n m", dtype="int64", values=values.permutation()),
            "q": tensor("n m", values=values.one_of(values.normal(), values.probabilities())),
            "f": tensor("n m", values=function),
            "o": tensor("n m", values=values.one_of(values.normal(), function)),
            "g": tensor("n m", values=function, layouts=["contiguous", "expanded"]),
            "i": tensor("n m", dtype="int64", values=values.indices("n")),
            "l": tensor("n m", dtype="int64", values=values.lengths("n")),
            "b": tensor("n m", dtype="int64", values=values.offsets("n")),
            "r": tensor("n m", dtype="int64", values=values.routing(8)),
            "t": tensor("n m", dtype="int64", values=values.page_table(8)),
        }
    )
    assert not any("expanded" in kinds(plan, name) for name in "pqfolbrt")
    assert all("expanded" in kinds(plan, name) for name in "gi")


def test_a_choice_with_regimes_of_its_own_is_drawn_from_all_of_them(plan_of: PlanOf) -> None:
    """``one_of(finite(), ...)`` had numbers of about 1 alone; beside another input's NaN special ones are left out."""
    inner = values.one_of(values.one_of(values.constant(3.0), values.default()), values.normal())
    plan = plan_of(
        {
            "x": tensor("n", values=values.one_of(values.finite(), values.normal())),
            "y": tensor("n", values=inner),
            "z": tensor("n"),
        }
    )
    assert build(plan, {}, 0).tensors["x"].regime == "0"
    assert build(plan, {"choice x": 1}, 0).tensors["x"].regime == "1"
    finite = {build(plan, {"choice x": 0}, seed).tensors["x"].regime for seed in range(400)}
    assert finite == {f"0/{name}" for name in regimes.COVERED if not regimes.is_special(name)}
    every = {build(plan, {"choice y": 0}, seed).tensors["y"].regime for seed in range(900)}
    assert every == {"0/0", *(f"0/1/{name}" for name in regimes.COVERED)}
    assert regimes.is_special("0/1/nan")
    assert not regimes.is_special("0/1/unit")
    beside = {build(plan, {"choice y": 0, "values": "nan"}, seed).tensors["y"].regime for seed in range(200)}
    assert not any(map(regimes.is_special, beside))


def test_special_values_go_into_one_tensor_at_a_time(plan_of: PlanOf) -> None:
    """NaN in all inputs would hide which one is mishandled; over some seeds each input gets it."""
    plan = plan_of({"x": tensor("n"), "y": tensor("n"), "i": tensor("n", dtype="int32")})
    hit = set()
    for seed in range(30):
        case = build(plan, {"values": "nan"}, seed)
        found = [name for name, entry in case.tensors.items() if entry.regime == "nan"]
        assert len(found) == 1
        hit.update(found)
    assert hit == {"x", "y"}
    everywhere = [build(plan, {"values": "offset"}, seed) for seed in range(30)]
    assert any(case.tensors["x"].regime == case.tensors["y"].regime == "offset" for case in everywhere)


def test_narrowed_values_are_not_overwritten_by_a_regime(plan_of: PlanOf) -> None:
    """A tensor with a profile of its own keeps it; a finite one gets no NaN; an absent one gets nothing."""
    plan = plan_of(
        {
            "x": tensor("n", values=values.positive()),
            "y": tensor("n", values=values.finite()),
            "z": optional(tensor("n")),
        }
    )
    for seed in range(10):
        case = build(plan, {"values": "nan", "present z": False}, seed)
        assert all(not regimes.is_special(entry.regime) for entry in case.tensors.values())
        assert case.tensors["x"].regime == "unit"


def test_the_kernels_blocks_become_sizes(plan_of: PlanOf) -> None:
    """With a block of 64 known, a size one beyond it can be chosen."""
    plan = plan_of({"x": tensor("n")}, blocks=(64,))
    assert build(plan, {"dim n": "block+1"}, 0).sizes["n"] == 65


def test_a_case_that_cannot_be_small_enough_is_impossible(plan_of: PlanOf) -> None:
    """Bounds whose smallest sizes exceed the limit of elements raise ``ImpossibleCase``, as negative sizes do."""
    plan = plan_of({"x": tensor("a b")}, dims={"a": dim(100), "b": dim(100)})
    with pytest.raises(ImpossibleCase, match="exceed the limit"):
        build(plan, {}, 0)
    with pytest.raises(ImpossibleCase, match="negative size"):
        build(plan_of({"x": tensor("n-1")}), {"dim n": 0}, 0)


def test_a_drawn_value_may_be_chosen_by_place_or_by_value(plan_of: PlanOf) -> None:
    """``drawn k`` is a place in the pool, ``value k`` the value itself, None included."""
    plan: Any = plan_of({"k": st.just(1), "x": tensor("n")}, pools={"k": (1, 2)})
    assert build(plan, {"drawn k": 1}, 0).drawn == {"k": 2}
    assert build(plan, {"value k": None}, 0).drawn == {"k": None}
