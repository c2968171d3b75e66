"""The shrinker reaches the known minimum of synthetic failures, the same one every time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_fusion import values
from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.case.plan import Plan, build
from pytest_fusion.diagnosis.shrink import MAX_RUNS, Shrinker
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.inputs import optional, tensor

INPUTS = {"x": tensor("rows hidden"), "w": tensor("hidden"), "b": optional(tensor("hidden"))}
HOSTILE = {
    "dim rows": 40, "dim hidden": 200, "dtype": "bfloat16", "layout x": ("transposed", 0), "offset x": 7,
    "layout w": ("step", 0), "offset w": 2, "values": "outlier", "present b": True,
}  # fmt: skip
Fails = Callable[[Case], bool]


def shrink(plan: Plan, choice: dict[str, Any], fails: Fails, **keywords: Any) -> tuple[Case, Shrinker]:
    case = build(plan, choice, 12345)
    assert fails(case), "the case that is shrunk must fail"
    shrinker = Shrinker(plan, case, fails, **keywords)
    return shrinker.run(), shrinker


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 40), hidden=st.integers(0, 200))
def test_two_thresholds_are_both_found(plan_of: Any, rows: int, hidden: int) -> None:
    """A failure from ``rows >= a and hidden >= b`` shrinks to exactly a and b."""
    fails: Fails = lambda case: case.sizes["rows"] >= rows and case.sizes["hidden"] >= hidden  # noqa: E731
    found, shrinker = shrink(plan_of(INPUTS), HOSTILE, fails)
    assert dict(found.sizes) == {"rows": rows, "hidden": hidden}
    assert shrinker.runs <= MAX_RUNS


def test_everything_that_is_not_needed_becomes_plain(plan_of: Any) -> None:
    """A failure of one size leaves no layout, offset, dtype, optional, regime or seed behind."""
    found, _ = shrink(plan_of(INPUTS), HOSTILE, lambda case: case.sizes["hidden"] > 2)
    assert dict(found.sizes) == {"rows": 0, "hidden": 3}
    assert found.dtype == "float32"
    assert found.absent == ("b",)
    assert found.seed == 0
    assert all(tensor.layout == Layout() and tensor.regime == "unit" for tensor in found.tensors.values())


@pytest.mark.parametrize("needed", [False, True])
def test_multiprocessors_stay_where_they_are_needed(plan_of: Any, needed: bool) -> None:
    """What fails on a whole H100 is told on one; what needs fewer keeps them, however small it becomes."""

    def fails(case: Case) -> bool:
        rows = case.sizes["rows"]
        return isinstance(rows, int) and rows > 8 and not (needed and case.multiprocessors is None)

    case = build(plan_of(INPUTS), HOSTILE, 12345).with_(multiprocessors=8)
    found = Shrinker(plan_of(INPUTS), case, fails).run()
    assert dict(found.sizes) == {"rows": 9, "hidden": 0}
    assert found.multiprocessors == (8 if needed else None)


@pytest.mark.parametrize(
    ("needed", "fails"),
    [
        ("layout", lambda case: case.tensors["x"].layout.kind == "transposed"),
        ("offset", lambda case: case.tensors["w"].layout.offset > 0),
        ("dtype", lambda case: case.dtype == "bfloat16"),
        ("optional", lambda case: "b" not in case.absent),
        ("regime", lambda case: any(t.regime == "outlier" for t in case.tensors.values())),
    ],
)
def test_the_one_thing_that_is_needed_stays_alone(plan_of: Any, needed: str, fails: Fails) -> None:
    """The minimum differs from the plainest case in what the failure needs, and in nothing else."""
    found, _ = shrink(plan_of(INPUTS), HOSTILE, fails)
    assert fails(found)
    assert dict(found.sizes) == {"rows": 0, "hidden": 0}
    unusual = {
        "layout": sum(t.layout.kind != "contiguous" for t in found.tensors.values()),
        "offset": sum(t.layout.offset > 0 for t in found.tensors.values()),
        "dtype": int(found.dtype != "float32"),
        "optional": int("b" not in found.absent),
        "regime": sum(t.regime != "unit" for t in found.tensors.values()),
    }
    assert unusual == {name: int(name == needed) for name in unusual}
    assert all(t.layout.offset in (0, 1) for t in found.tensors.values())


def test_dims_that_belong_together_shrink_together(plan_of: Any) -> None:
    """With heads a multiple of kv, a failure of ``heads >= 2 * kv >= 2`` shrinks to 2 heads and 1 kv."""
    plan = plan_of({"x": tensor("heads kv")}, dims={"heads": dim(multiple_of="kv")})
    found, _ = shrink(
        plan, {"dim heads": 24, "dim kv": 4}, lambda case: case.sizes["heads"] >= 2 * case.sizes["kv"] >= 2
    )
    assert dict(found.sizes) == {"heads": 2, "kv": 1}


def test_bounds_are_kept_while_shrinking(plan_of: Any) -> None:
    """No candidate leaves its bounds: a dim of 8 to 64 in steps of 8 that fails from 20 on ends at 24."""
    seen: set[int] = set()
    plan = plan_of({"x": tensor("n")}, dims={"n": dim(8, 64, multiple_of=8)})

    def fails(case: Case) -> bool:
        seen.add(case.sizes["n"])  # type: ignore[arg-type]
        return case.sizes["n"] >= 20  # type: ignore[operator]

    found, _ = shrink(plan, {"dim n": 64}, fails)
    assert dict(found.sizes) == {"n": 24}
    assert seen <= set(range(8, 65, 8))


def test_a_batch_shrinks_to_the_fewest_dimensions(plan_of: Any) -> None:
    """A failure that needs two leading dimensions keeps two, of the smallest sizes that fail."""
    plan = plan_of({"x": tensor("*batch hidden")})
    found, _ = shrink(plan, {"dim batch": (3, 2), "dim hidden": 20}, lambda case: len(case.sizes["batch"]) == 2)
    assert found.sizes["batch"] == (1, 1)
    found, _ = shrink(plan, {"dim batch": (3, 2), "dim hidden": 20}, lambda case: case.sizes["hidden"] > 4)
    assert dict(found.sizes) == {"batch": (), "hidden": 5}


def test_a_batch_of_many_rows_shrinks_to_the_fewest(plan_of: Any) -> None:
    """Rows become one dimension and as few as still fail; where two dimensions are needed, each becomes short."""
    plan = plan_of({"x": tensor("*batch hidden")})
    found, _ = shrink(plan, {"dim batch": (20, 4), "dim hidden": 2}, lambda case: math.prod(case.sizes["batch"]) > 16)
    assert found.sizes["batch"] == (17,)
    found, _ = shrink(
        plan, {"dim batch": (30, 9), "dim hidden": 2}, lambda case: math.prod(case.sizes["batch"][1:]) > 3
    )
    assert found.sizes["batch"] == (1, 4)


def test_drawn_values_and_choices_go_back_to_the_first(plan_of: Any) -> None:
    """A drawn value that is not needed becomes the simplest of its pool, a profile of ``one_of`` the first."""
    inputs = {
        "k": st.sampled_from([1, 2, 3]),
        "x": tensor("n", values=values.one_of(values.normal(), values.positive())),
    }
    plan = plan_of(inputs, pools={"k": (1, 2, 3)})
    choice = {"drawn k": 2, "choice x": 1, "dim n": 9}
    found, _ = shrink(plan, choice, lambda case: True)
    assert found.drawn == {"k": 1}
    assert found.tensors["x"].regime == "0"
    found, _ = shrink(plan, choice, lambda case: case.drawn["k"] >= 2)
    assert found.drawn == {"k": 2}


@pytest.mark.parametrize(
    ("profile", "needed", "smallest"),
    [
        (values.indices("n"), {"hot", "equal", "runs", "ends"}, "hot"),
        (values.lengths("n"), {"one long", "some empty"}, "some empty"),
        (values.one_of(values.constant(1), values.indices("n")), {"1/hot", "1/equal", "1/ends"}, "1/hot"),
        (values.one_of(values.constant(1), values.indices("n")), {"1", "1/even", "1/ends"}, "1"),
    ],
)
def test_structured_values_go_back_to_the_plainest_kind_that_fails(
    plan_of: Any, profile: Any, needed: set[str], smallest: str
) -> None:
    """Not to any that fails, and not past one that does not."""
    plan = plan_of({"index": tensor("n", dtype="int64", values=profile)})
    case = build(plan, {"dim n": 9}, 7).with_tensor("index", regime=max(needed, key=len))
    found = Shrinker(plan, case, lambda one: one.tensors["index"].regime in needed).run()
    assert found.tensors["index"].regime == smallest


def test_a_dtype_of_its_own_shrinks_too(plan_of: Any) -> None:
    """A tensor that draws int64 or int32 ends at int32 unless int64 is needed."""
    plan = plan_of({"i": tensor("n", dtype=["int64", "int32"])})
    choice = {"dtype i": "int64", "dim n": 3}
    assert shrink(plan, choice, lambda case: True)[0].tensors["i"].dtype == "int32"
    needed: Fails = lambda case: case.tensors["i"].dtype == "int64"  # noqa: E731
    assert shrink(plan, choice, needed)[0].tensors["i"].dtype == "int64"


def test_the_minimum_is_the_same_every_time_and_no_case_runs_twice(plan_of: Any) -> None:
    """Two runs of the shrinker ask for the same cases in the same order, each once."""
    runs: list[list[str]] = []
    for _ in range(2):
        asked: list[str] = []

        def fails(case: Case, asked: list[str] = asked) -> bool:
            asked.append(case.key())
            return case.sizes["hidden"] * case.sizes["rows"] > 100  # type: ignore[operator]

        plan = plan_of(INPUTS)
        Shrinker(plan, build(plan, HOSTILE, 12345), fails).run()
        runs.append(asked)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == len(runs[0])


def test_what_fails_no_simpler_stays_itself(plan_of: Any) -> None:
    """Where only the original fails, it is the minimum, after a bounded number of runs."""
    plan = plan_of(INPUTS)
    original = build(plan, HOSTILE, 12345)
    found, shrinker = shrink(plan, HOSTILE, lambda case: case == original)
    assert found == original
    assert 0 < shrinker.runs <= MAX_RUNS


def test_the_number_of_runs_is_bounded(plan_of: Any) -> None:
    """A limit of five runs is kept even where every candidate fails."""
    _, shrinker = shrink(plan_of(INPUTS), HOSTILE, lambda case: True, max_runs=5)
    assert shrinker.runs == 5


@pytest.mark.parametrize("layouts", [("transposed", "contiguous"), ("expanded", "step", "padded", "transposed")])
def test_the_order_of_a_specs_layouts_is_no_order_of_simplicity(plan_of: Any, layouts: tuple[str, ...]) -> None:
    """The plainest of the layouts that a spec lists in any order is where a failure of all of them ends."""
    plan = plan_of({"x": tensor("rows hidden", layouts=layouts)})
    choice = {"dim rows": 4, "dim hidden": 9, "layout x": ("transposed", 0)}
    found, _ = shrink(plan, choice, lambda case: True)
    assert found.tensors["x"].layout.kind == ("contiguous" if "contiguous" in layouts else "padded")


def test_candidates_that_disagree_come_to_rest(plan_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases each of which is offered as the simpler one of the other are not taken in turns for ever."""

    def in_turns(self: Shrinker) -> Any:
        yield self.case.with_(seed=1 - self.case.seed if self.case.seed in (0, 1) else 0)

    monkeypatch.setattr(Shrinker, "_seeds", in_turns)
    found, shrinker = shrink(plan_of(INPUTS), HOSTILE, lambda case: True)
    assert found.seed in (0, 1)
    assert shrinker.runs <= MAX_RUNS


def test_sizes_that_cannot_be_are_not_tried(plan_of: Any) -> None:
    """A dim that another must be a multiple of never makes the shrinker fail on the way."""
    plan = plan_of({"x": tensor("a b")}, dims={"a": dim(6, 6, multiple_of="b"), "b": dim(1, 6)})
    try:
        case = build(plan, {"dim b": 6}, 1)
    except ImpossibleCase:
        pytest.fail("6 is a multiple of 6")
    found = Shrinker(plan, case, lambda case: case.sizes["b"] > 1).run()  # type: ignore[operator]
    assert dict(found.sizes) == {"a": 6, "b": 2}


def test_other_seeds_are_asked_where_few_are_enough(plan_of: Any) -> None:
    """A failure that two seeds of five show at the smallest size is shrunk to it, and not without other seeds."""
    fails: Fails = lambda case: case.sizes["hidden"] > 9 or case.seed in (3, 4)  # noqa: E731
    assert shrink(plan_of(INPUTS), HOSTILE, fails, seeds=5)[0].sizes["hidden"] == 0
    assert shrink(plan_of(INPUTS), HOSTILE, fails)[0].sizes["hidden"] == 10


def test_chance_is_asked_several_times(plan_of: Any) -> None:
    """A case whose bug shows every third time only is not given up; of a size with many seeds, each seed is a try."""
    asked: Counter[str] = Counter()
    sizes: dict[str, Any] = {}

    def every_third(case: Case) -> bool:
        asked[case.key()] += 1
        sizes[case.key()] = dict(case.sizes)
        return case.sizes["hidden"] > 2 and asked[case.key()] % 3 == 0

    plan = plan_of(INPUTS)
    found = Shrinker(plan, build(plan, HOSTILE, 12345), every_third, tries=3).run()
    assert dict(found.sizes) == {"rows": 0, "hidden": 3}
    assert found.dtype == "float32"
    assert max(asked.values()) == 3

    asked.clear()
    Shrinker(plan, build(plan, HOSTILE, 12345), lambda case: every_third(case) and False, by_values=True, tries=3).run()
    without_rows = {key: times for key, times in asked.items() if sizes[key] == {"rows": 0, "hidden": 200}}
    assert len(without_rows) > 3
    assert set(without_rows.values()) == {1}
