"""The covering phase: every pair of levels in few cases."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from pytest_fusion.case import regimes
from pytest_fusion.case.case_model import Case, Layout, TensorCase
from pytest_fusion.case.choosing import covering
from pytest_fusion.case.choosing.covering import covering_array
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.case.plan import Limits, Plan, build
from pytest_fusion.case.stated import misfit
from pytest_fusion.spec import values
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.inputs import optional, tensor

PlanOf = Callable[..., Plan]

SPECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "matrix": ({"x": tensor("rows hidden"), "w": tensor("hidden"), "b": optional(tensor("hidden"))}, {}),
    "one factor": ({"x": tensor("n", dtype="int32", layouts="contiguous")}, {"dtypes": "float32"}),
    "drawn": ({"k": st.just([1]), "x": tensor("2", dtype=["int8", "int16"])}, {"pools": {"k": ([1], [2], [3])}}),
    "bounded": ({"x": tensor("a b")}, {"dims": {"a": dim(4, 4), "b": dim(multiple_of="a")}}),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_rows_hold_every_pair_of_levels(plan_of: PlanOf, name: str) -> None:
    """Each pair of levels of each two factors occurs in some row, and the count says so."""
    inputs, keywords = SPECS[name]
    plan = plan_of(inputs, **keywords)
    rows = list(covering.rows(plan))
    count = covering.PairCount(plan)
    for row in rows:
        assert set(row) == set(plan.factors)
        count.add(row)
    for a, b in itertools.combinations(plan.factors, 2):
        met = {(repr(row[a]), repr(row[b])) for row in rows}
        assert len(met) == len(plan.factors[a]) * len(plan.factors[b]), (a, b)
    assert count.as_json()["share"] == 1.0
    if len(plan.factors) == 1:
        assert len(rows) == len(next(iter(plan.factors.values())))


@pytest.mark.parametrize(
    ("counts", "digest"),
    [
        ((2, 2), "4283e858b06ea7cc"),
        ((1, 1, 1), "ec5183f764f81ac2"),
        ((9, 1, 7), "f76b68496d81eb85"),
        ((3, 1, 6, 1, 8, 5, 2, 8), "1c07c62675589d57"),
        ((3, 6, 11, 5, 11, 2, 5, 8, 12), "dc9cabe138b44aa4"),
    ],
)
def test_pairs_are_chosen_as_ever(counts: tuple[int, ...], digest: str) -> None:
    """The rows and their order are those of covertable 3.2, for factors of one level and of many."""
    rows = list(covering_array(counts))

    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:16] == digest


def test_the_rows_are_far_fewer_than_all_combinations(plan_of: PlanOf) -> None:
    """The matrix needs no more than three times the product of its two longest factors."""
    plan = plan_of(SPECS["matrix"][0])
    longest = sorted((len(levels) for levels in plan.factors.values()), reverse=True)
    assert len(list(covering.rows(plan))) <= 3 * longest[0] * longest[1]


def test_a_spec_without_choices_has_one_case(plan_of: PlanOf) -> None:
    """Constants alone are a single, empty choice."""
    assert list(covering.rows(plan_of({"k": 3}))) == [{}]


def test_half_of_the_pairs_are_counted_as_half(plan_of: PlanOf) -> None:
    """Levels outside of the plan, such as random sizes, count for nothing."""
    plan = plan_of({"x": tensor("2", dtype=["int8", "int16"], layouts=["contiguous", "padded"])}, dtypes="float32")
    assert {name: len(levels) for name, levels in plan.factors.items()} == {"layout x": 3, "dtype x": 2}
    count = covering.PairCount(plan)
    count.add({"layout x": ("contiguous", 0), "dtype x": "int8"})
    count.add({"layout x": ("contiguous", 0), "dtype x": "int99"})
    assert count.as_json() == {"pairs": 6, "covered": 1, "share": round(1 / 6, 4)}
    first, *others = count.unmet()
    assert first == "layout x=('contiguous', 0) with dtype x='int16'"
    assert [line.partition(" with ")[2] for line in others] == ["dtype x='int8' | 'int16'"] * 2


@pytest.mark.slow
def test_the_rows_are_the_same_in_every_process() -> None:
    """Neither hash seeds nor anything else of a process decides which cases a test runs."""
    program = """
from pytest_fusion.case.choosing.covering import rows
from pytest_fusion.case.plan import Limits, make_plan
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import tensor
f = lambda x, w: x
spec = FusionSpec(fused=f, reference=f, inputs={"x": tensor("a b"), "w": tensor("b")})
found = [sorted(row.items()) for row in rows(make_plan(spec, limits=Limits()))]
"""
    here: dict[str, Any] = {}
    exec(program, here)  # noqa: S102 - the same program in this process and in another
    other = subprocess.run(
        [sys.executable, "-c", program + "print(found)"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(here["found"]) > 50
    assert other.stdout.strip() == str(here["found"])


def test_tensors_lie_alike_in_every_fourth_case(plan_of: PlanOf) -> None:
    """What a fast path asks of all inputs at once, is met at every size, dtype and regime; also with a pitch."""
    inputs = {"x": tensor("rows hidden"), "y": tensor("rows hidden", layouts="contiguous"), "w": tensor("hidden")}
    plan = plan_of(inputs)
    rows = list(itertools.islice(covering.mixed_rows(plan), 130))
    alike = [row for row in rows if "layout w" not in row or row["layout w"] == ("pitched", 16)]
    odd = [row for row in alike if row.get("layout x") == ("padded", 0)]
    pitched = [row for row in alike if "layout x" in row and row not in odd]

    assert 130 // 4 <= len(alike) <= 40  # the others end before 130
    assert len(pitched) == len(alike) // 4
    assert len(alike) // 8 <= len(odd) <= len(alike) // 8 + 1
    assert any(isinstance(row["dim hidden"], int) and row["dim hidden"] % 16 == 0 for row in odd)
    assert all("layout w" not in row and "layout y" not in row for row in odd)
    assert all(row["layout x"] == ("pitched", 16) and "layout y" not in row for row in pitched)
    assert not any(name.startswith("offset") for row in alike for name in row)
    for name, levels in plan.factors.items():
        if not name.startswith(("layout", "offset")):
            assert {row[name] for row in alike} >= set(levels), name
    assert sum(isinstance(row["dim hidden"], int) and row["dim hidden"] % 16 == 0 for row in alike) >= 20
    assert [row for row in rows if row not in alike] == list(itertools.islice(covering.rows(plan), 98))


@pytest.mark.parametrize("name", SPECS)
def test_each_case_can_be_replayed(plan_of: PlanOf, name: str) -> None:
    """Those with a pitch were refused as cases of another spec: by ``--fusion-replay``, as pins, by a canary."""
    inputs, keywords = SPECS[name]
    plan = plan_of(inputs, **keywords)
    kinds = set()
    for turn, row in enumerate(itertools.chain(*(some(plan) for some in (covering.mixed_rows, covering.long_rows)))):
        if turn == 300:
            break
        try:
            case = build(plan, row, turn)
        except ImpossibleCase:
            continue
        assert misfit(plan.spec, case) is None
        kinds |= {entry.layout.kind for entry in case.tensors.values()}
    assert ("pitched" in kinds) == (name != "one factor")


def test_rows_with_a_pitch_are_of_a_spec_that_has_padded_ones(plan_of: PlanOf) -> None:
    """Where ``layouts=`` leaves those out, a case with a pitch is none of it."""
    case = Case({"n": 2, "m": 3}, "float32", {"x": TensorCase("float32", Layout("pitched", 0, 16))})
    assert misfit(plan_of({"x": tensor("n m", layouts=("contiguous", "padded"))}).spec, case) is None
    told = misfit(plan_of({"x": tensor("n m", layouts=("contiguous", "step"))}).spec, case)
    assert told == "'x' has the layout 'pitched', which the spec does not draw"


def test_a_fast_path_with_a_flag_and_a_dtype_is_met(plan_of: PlanOf) -> None:
    """Whole vectors in contiguous rows, one dtype of three and one flag of two: several of 130 cases have it all."""
    plan = plan_of({"x": tensor("rows 2*half"), "limit": st.booleans()}, pools={"limit": (False, True)})
    rows = list(itertools.islice(covering.mixed_rows(plan), 130))

    def fast(row: dict[str, Any]) -> bool:
        plain = row.get("layout x", ("contiguous", 0)) == ("contiguous", 0) and not row.get("offset x", 0)
        vectors = isinstance(row["dim half"], int) and row["dim half"] % 16 == 0
        return plain and vectors and row["dtype"] == "bfloat16" and row["drawn limit"] == 1

    assert sum(map(fast, rows)) >= 2
    assert not any(fast(row) for row in covering.rows(plan))


@pytest.mark.parametrize(("budget", "pairs", "long"), [(60, 50, 10), (12, 10, 2), (5, 5, 0), (1000, 130, 30)])
def test_few_cases_are_shared_with_long_ones(budget: float, pairs: int, long: int) -> None:
    """A sixth of what somebody asks for is long, among them some of each dim; else there is room for all."""
    found = list(covering.within(budget, iter(range(130)), range(1000, 1030)))
    assert found[:pairs] == list(range(pairs))
    assert len(found) == pairs + long
    assert found == sorted(set(found))
    if long > 2:
        assert max(b - a for a, b in itertools.pairwise([1000, *found[pairs:], 1029])) <= 2 * 30 // long
        assert {turn % 2 for turn in found[pairs:]} == {0, 1}


def test_where_pairs_are_few_long_ones_have_the_rest() -> None:
    """Ten pairs of a plain spec leave 30 of 40 cases."""
    assert list(covering.within(40, iter(range(10)), range(100, 130))) == [*range(10), *range(100, 130)]
    assert list(covering.within(math.inf, iter(range(2)), range(5, 7))) == [0, 1, 5, 6]


def test_where_time_may_be_up_long_ones_come_between() -> None:
    """After the first twenty one of ten is long, in their order; what is left of either follows."""
    found = list(covering.within(math.inf, iter(range(38)), range(100, 104), (20, 10)))
    assert found == [*range(27), 100, *range(27, 36), 101, 36, 37, 102, 103]
    assert list(covering.within(40, iter(range(10)), range(100, 130), (20, 10)))[:10] == list(range(10))


def test_the_first_few_of_spread_rows_are_from_everywhere() -> None:
    """Each third of the list has one of the first three, each half two or three of the first five."""
    found = covering.spread(range(30))
    assert sorted(found) == list(range(30))
    assert sorted(place // 10 for place in found[:3]) == [0, 1, 2]
    assert sum(place < 15 for place in found[:5]) in (2, 3)


def test_without_layouts_there_are_no_such_cases(plan_of: PlanOf) -> None:
    """All cases are contiguous anyway; where one kind of rows ends, the other goes on."""
    plan = plan_of({"x": tensor("rows hidden", layouts="contiguous"), "k": st.booleans()}, pools={"k": (False, True)})
    assert len(plan.factors["layout x"]) == 2
    plan = plan_of({"x": tensor("a"), "y": tensor("a")}, dims={"a": dim(3, 3)}, dtypes="float32")
    assert len(list(covering.mixed_rows(plan))) == len([*covering.rows(plan), *covering.alike_rows(plan)])


def test_each_dim_is_long_in_turn(plan_of: PlanOf) -> None:
    """Past a grid axis of 65535 goes every dim that may, with the others small; a bounded one is left out."""
    plan = plan_of({"x": tensor("rows hidden")}, dims={"hidden": dim(1, 64)})
    longest = [row for row in covering.long_rows(plan) if max(row["dim rows"], row["dim hidden"]) > 65535]
    assert [row["dim rows"] for row in longest] == [65537, 66560]
    assert all(row["dim hidden"] <= 64 or row["dim hidden"] // 2 <= 64 for row in covering.long_rows(plan))


@pytest.mark.parametrize(("most", "even"), [(1024, 1024), (1200, 1024), (800, 768), (5000, 4864), (100_000, 66560)])
def test_a_long_even_size_is_whole_blocks_where_a_dim_is_bounded(plan_of: PlanOf, most: int, even: int) -> None:
    """1200 is no whole number of blocks, 1024 is: of 256 and, if it may, of 512 elements."""
    plan = replace(plan_of({"x": tensor("rows n")}, dims={"n": dim(1, most)}), limits=Limits())
    contiguous = [row for row in covering.long_rows(plan) if "layout x" not in row]
    assert max(build(plan, row, 1).sizes["n"] for row in contiguous) == even


def test_long_rows_meet_flags_both_ways(plan_of: PlanOf) -> None:
    """Each of the largest sizes is met with an optional tensor and without, with a drawn flag and without."""
    inputs = {"x": tensor("rows n"), "bias": optional(tensor("n")), "flag": st.booleans()}
    rows = list(covering.long_rows(plan_of(inputs, pools={"flag": (False, True)})))
    for sizes in ({1025, 1536}, {4097, 6144}, {65537, 66560}):
        met = [row for row in rows if row["dim n"] in sizes]
        assert {row["present bias"] for row in met} == {True, False}
        assert {row["drawn flag"] for row in met} == {0, 1}
    assert len({row["layout x"] for row in rows if "layout x" in row}) > 3
    assert [{"layout x", "offset bias"} <= set(row) for row in rows if row["dim n"] in (4097, 6144)] == [True, False]
    kinds = {row["values"] for row in rows if "values" in row}
    assert len(kinds) > 2
    assert set(filter(regimes.is_special, kinds)) == {"masked"}


@pytest.mark.parametrize(
    ("shape", "bounds", "profile", "found"),
    [
        ("rows n", {}, None, [(2, 65536)]),
        ("rows n", {"n": dim(1, 4096)}, None, []),
        ("rows n", {}, values.normal(), []),
        ("n", {}, None, [(65536,)]),
    ],
)
def test_of_the_longest_rows_two_begin_with_nothing_finite(
    plan_of: PlanOf, shape: str, bounds: Any, profile: Any, found: list[Any]
) -> None:
    """A cross entropy with blocks of 32768 columns was NaN where the whole first block is masked."""
    plan = replace(plan_of({"x": tensor(shape, values=profile)}, dims=bounds), limits=Limits())
    masked = [build(plan, row, 1) for row in covering.long_rows(plan) if row.get("values") == "masked"]
    assert [tuple(case.sizes[name] for name in shape.split()) for case in masked] == found
    assert all(case.tensors["x"].regime == "masked" for case in masked)


def test_two_dims_are_long_at_once(plan_of: PlanOf) -> None:
    """Every dim that may be is beside another of several blocks, contiguous and not; one alone is not."""
    plan = plan_of({"x": tensor("rows n"), "bias": tensor("n")})
    rows = list(covering.broad_rows(plan))
    sizes = [(row["dim rows"], row["dim n"]) for row in rows]
    assert sizes == [(640, 160), (129, 577), (577, 129), (160, 640)]
    assert ["layout x" in row for row in rows] == [False, True, True, False]
    assert not any(regimes.is_special(row["values"]) for row in rows)
    for row in rows:
        case = build(replace(plan, limits=Limits()), row, 1)
        assert (case.sizes["rows"], case.sizes["n"]) == (row["dim rows"], row["dim n"])
    assert list(covering.broad_rows(plan_of({"x": tensor("n")}))) == []
    assert list(covering.broad_rows(plan_of({"x": tensor("rows n")}, dims={"n": dim(1, 128)}))) == []
    (vast,) = list(covering.broad_rows(replace(plan, limits=Limits(1 << 19))))[4:]
    assert vast["dim rows"] * vast["dim n"] > 2**18
    many = list(covering.broad_rows(plan_of({"x": tensor("a b c d e")})))
    assert len(many) == 4
    assert all(sorted(row[f"dim {name}"] for name in "abcde")[:3] in ([1, 1, 1], [3, 3, 3]) for row in many)


def test_special_values_meet_several_elements_among_plain_layouts(plan_of: PlanOf) -> None:
    """Where all tensors are contiguous NaN and infinities never lie alone in a dim; ordinary values do, and in other
    layouts NaN does too."""
    plan = plan_of({"x": tensor("*batch a b"), "k": st.sampled_from([1, 2, 3])}, pools={"k": (1, 2, 3)})
    sized = ("dim batch", "dim a", "dim b")
    alone = {"one", (), (1,)}

    def lonely(rows: list[dict[str, Any]], special: bool) -> bool:
        found = (row for row in rows if regimes.is_special(row["values"]) is special)
        return any(row[name] in alone or row[name] == 1 for row in found for name in sized)

    alike, every = list(covering.alike_rows(plan)), list(covering.rows(plan))
    assert {row["values"] for row in alike} == set(plan.factors["values"])
    assert not lonely(alike, special=True)
    assert lonely(alike, special=False)
    assert lonely(every, special=True)
