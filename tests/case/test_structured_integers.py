"""Whole numbers as real data have them: what each kind promises, at every size."""

from __future__ import annotations

import re

import pytest
import torch

from pytest_fusion.case import structured_integers
from pytest_fusion.case.case_model import Case, TensorCase
from pytest_fusion.case.make import ImpossibleCase, make_inputs, make_tensor
from pytest_fusion.case.plan import Limits, build, make_plan
from pytest_fusion.case.stated import misfit
from pytest_fusion.errors import SpecError
from pytest_fusion.spec import values
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
from pytest_fusion.spec.values import ValueProfile

CPU = torch.device("cpu")
SEEDS = range(8)


def labels(profile: ValueProfile) -> list[str]:
    return [choice.label for choice in profile.choices]


@pytest.mark.parametrize("kind", labels(values.indices(1)))
@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_indices_stay_within_their_size(kind: str, size: int) -> None:
    """Of any shape, also without elements."""
    for seed in SEEDS:
        for shape in ((), (1,), (0,), (3, 40)):
            found = structured_integers.indices(kind, shape, size, seed, CPU)
            assert tuple(found.shape) == shape
            assert found.numel() == 0 or 0 <= int(found.min()) <= int(found.max()) < size


def test_indices_are_as_uneven_as_their_kind_says() -> None:
    """Counts of 100 indices into 50 rows."""

    def counts(kind: str) -> torch.Tensor:
        return torch.bincount(structured_integers.indices(kind, (100,), 50, 1, CPU), minlength=50)

    assert counts("even").max() < 10
    assert counts("zipf")[0] > 3 * counts("zipf")[20]
    assert counts("hot").max() > 80
    assert counts("equal").max() == 100
    assert counts("gaps")[1::2].sum() == 0
    assert counts("ends")[0] == counts("ends")[49] == 50
    assert counts("once").tolist() == [2] * 50
    assert structured_integers.indices("once", (50,), 50, 1, CPU).unique().numel() == 50
    assert bool((structured_integers.indices("sorted", (100,), 50, 1, CPU).diff() >= 0).all())
    assert structured_integers.indices("runs", (100,), 50, 1, CPU).unique_consecutive().numel() <= 20


@pytest.mark.parametrize("kind", labels(values.offsets(1)))
@pytest.mark.parametrize(("count", "total"), [(1, 0), (1, 9), (2, 1), (5, 3), (5, 100), (40, 7)])
def test_lengths_add_up_and_offsets_rise_to_the_total(kind: str, count: int, total: int) -> None:
    """Of one sequence and many, of fewer elements than sequences."""
    for seed in SEEDS:
        found = structured_integers.lengths(kind, (count,), total, seed, CPU)
        assert int(found.sum()) == total
        assert int(found.min()) >= 0
        offsets = structured_integers.offsets(kind, (count + 1,), total, seed, CPU)
        assert offsets.tolist() == [0, *found.cumsum(0).tolist()]


def test_sequences_are_empty_where_their_kind_says() -> None:
    """The first, the last, or all but one short."""
    assert structured_integers.lengths("empty first", (4,), 20, 1, CPU)[0] == 0
    assert structured_integers.lengths("empty last", (4,), 20, 1, CPU)[-1] == 0
    assert sorted(structured_integers.lengths("one long", (4,), 20, 1, CPU).tolist()) == [1, 1, 1, 17]
    assert any(0 in structured_integers.lengths("some empty", (6,), 20, seed, CPU).tolist() for seed in SEEDS)


@pytest.mark.parametrize("kind", labels(values.routing(1)))
def test_each_row_has_different_experts(kind: str) -> None:
    """As many as there are, too."""
    for seed in SEEDS:
        for width, experts in ((1, 1), (2, 2), (2, 8), (3, 5)):
            found = structured_integers.routing(kind, (20, width), experts, seed, CPU)
            assert int(found.max()) < experts
            assert all(len(set(row)) == width for row in found.tolist())
    assert bool(
        (
            structured_integers.routing("all to one", (20, 2), 8, 1, CPU)[:, 0]
            == structured_integers.routing("all to one", (20, 2), 8, 1, CPU)[0, 0]
        ).all()
    )
    assert int(structured_integers.routing("starved", (20, 2), 8, 1, CPU).max()) == 3
    assert torch.bincount(structured_integers.routing("balanced", (20, 2), 8, 1, CPU).flatten()).tolist() == [5] * 8


@pytest.mark.parametrize("kind", labels(values.page_table(1, holes=True)))
def test_no_page_is_used_twice(kind: str) -> None:
    """Holes are at the end of rows."""
    for seed in SEEDS:
        found = structured_integers.pages(kind, (4, 5), 30, seed, CPU)
        used = found[found >= 0]
        assert used.unique().numel() == used.numel()
        assert int(found.max()) < 30
        assert (kind == "holes") or used.numel() == 20
        assert all(row == sorted(row, key=lambda page: page < 0) for row in found.tolist())


@pytest.mark.parametrize(
    ("profile", "shape"),
    [
        (values.indices("n"), "rows"),
        (values.offsets("rows"), "n"),
        (values.routing("n"), "rows 2"),
        (values.page_table("n"), "rows"),
    ],
)
def test_sizes_that_admit_none_make_no_case(profile: ValueProfile, shape: str) -> None:
    """An index into nothing, offsets without an end, too few experts or pages."""
    case = Case({"rows": 3, "n": 0 if profile.kind != "offsets" else 1}, "float32", {"x": TensorCase("int64")})
    with pytest.raises(ImpossibleCase):
        make_tensor("x", tensor(shape, dtype=torch.int64, values=profile), case, CPU)


def test_a_plan_draws_each_kind_and_a_case_names_it() -> None:
    """So it replays and shrinks like any other choice; a case without a name is even."""
    inputs = {"x": tensor("rows", dtype=torch.int64, values=values.indices("vocab"))}
    spec = FusionSpec(fused=lambda x: x, reference=lambda x: x, inputs=inputs, dims={"vocab": dim(1, 9)})
    plan = make_plan(spec, limits=Limits())
    levels = plan.factors["choice x"]
    found = [build(plan, {"choice x": level, "dim rows": 40}, 1).tensors["x"].regime for level in levels]
    assert found == labels(values.indices(1))
    assert build(plan, {}, 1).tensors["x"].ordinary
    made = make_tensor("x", inputs["x"], build(plan, {"choice x": 3, "dim rows": 40}, 1), CPU)
    assert made.unique().numel() == 1


def test_an_unknown_kind_is_an_error_that_names_the_nearest() -> None:
    """Of a profile, of a case, and of a stored case; a case without a name is even."""
    for make, kind, near in (
        (structured_integers.indices, "hott", "hot"),
        (structured_integers.offsets, "raged", "ragged"),
        (structured_integers.lengths, "empty frist", "empty first"),
        (structured_integers.routing, "all_to_one", "all to one"),
        (structured_integers.pages, "hole", "holes"),
    ):
        with pytest.raises(SpecError, match=f"the kind {kind!r} do not exist; did you mean {near!r}"):
            make(kind, (3,), 5, 1, CPU)
    inputs = {
        "x": tensor("rows", dtype=torch.int64, values=values.indices(9)),
        "y": tensor("rows", values=values.one_of(values.normal(), values.positive())),
    }
    spec = FusionSpec(fused=lambda x, y: x, reference=lambda x, y: x, inputs=inputs)
    case = build(make_plan(spec, limits=Limits()), {"dim rows": 4}, 1)
    assert misfit(spec, case) is None
    assert misfit(spec, case.with_tensor("x", regime="unit")) is None
    for name, regime, near in (("x", "sroted", "; did you mean 'sorted'?"), ("y", "2", "; known: 0, 1")):
        wrong = case.with_tensor(name, regime=regime)
        with pytest.raises(SpecError, match=re.escape(f"values of the kind {regime!r} do not exist{near}")):
            make_tensor(name, inputs[name], wrong, CPU)
        assert misfit(spec, wrong) == f"of {name!r}, values of the kind {regime!r} do not exist{near}"


def test_a_dim_may_be_the_sum_or_the_largest_of_drawn_lengths() -> None:
    """Lengths add up to one dim; others are at most another one, and reach it in some cases."""
    inputs = {
        "packed": tensor("total hidden"),
        "lengths": tensor("batch", dtype=torch.int64, values=values.lengths("total")),
        "padded": tensor("batch longest hidden"),
        "used": tensor("batch", dtype=torch.int64, values=values.integers(0, "longest")),
    }
    spec = FusionSpec(
        fused=lambda **given: given, reference=lambda **given: given, inputs=inputs, dims={"batch": dim(1)}
    )
    plan, reached = make_plan(spec, limits=Limits()), 0
    for seed in SEEDS:
        made = make_inputs(spec, build(plan, {"dim batch": 4, "dim total": 17, "dim longest": 9}, seed), CPU)
        assert int(made["lengths"].sum()) == len(made["packed"]) == 17
        assert int(made["used"].max()) <= made["padded"].shape[1] == 9
        reached += int(made["used"].max()) == 9
    assert 0 < reached < len(SEEDS)
