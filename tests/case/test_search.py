"""Random search with Hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, is_hypothesis_test, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st

from pytest_fusion import values
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.choosing import search
from pytest_fusion.case.plan import Plan
from pytest_fusion.case.stated import misfit
from pytest_fusion.spec.dims import dim
from pytest_fusion.spec.inputs import optional, tensor

PlanOf = Callable[..., Plan]

INDICES = values.one_of(values.integers(0, 3), values.indices("hidden"))
INPUTS: dict[str, Any] = {
    "x": tensor("*batch hidden", values=values.finite()),
    "i": tensor("hidden", dtype=["int32", "int64"], values=INDICES),
    "b": optional(tensor("hidden")),
    "eps": st.floats(0, 1),
}


def outer_test(*decorators: Any) -> Any:
    def outer() -> None: ...

    for decorate in decorators:
        outer = decorate(outer)
    adopted = lambda: None  # noqa: E731 - the wrapper that pytest collects
    search.adopt(adopted, outer)
    return adopted


def run(plan: Plan, note: Any, outer: Any = None, **keywords: Any) -> Any:
    given = {"cases": 30, "seed": 1, "database_key": None, **keywords}
    return search.search(plan, note, outer=outer or outer_test(), **given)


@pytest.fixture
def plan(plan_of: PlanOf, make_spec: Any) -> Plan:
    spec = make_spec(INPUTS, dims={"hidden": dim(max=500)})
    return plan_of(INPUTS, pools=search.pools(spec, 3), dims={"hidden": dim(max=500)})


def test_the_search_draws_different_cases_that_are_all_of_the_spec(plan: Plan) -> None:
    """Sizes, layouts, dtypes, regimes, options and drawn values vary, inside their bounds."""
    cases: list[Case] = []

    def note(case: Case, choice: Mapping[str, Any]) -> float | None:
        cases.append(case)
        return None

    statistics = run(plan, note, cases=40)
    assert 20 <= len(cases) <= 40
    assert statistics
    assert len({case.key() for case in cases}) > 20
    assert len({case.sizes["hidden"] for case in cases}) > 5
    assert {case.absent for case in cases} == {(), ("b",)}
    assert [misfit(plan.spec, case) for case in cases] == [None] * len(cases)
    assert "nan" not in {case.tensors["x"].regime for case in cases}


def test_equal_seeds_draw_equal_cases(plan: Plan) -> None:
    """A seed decides the whole search, another one another search."""

    def keys(seed: int) -> list[str]:
        found: list[str] = []
        run(plan, lambda case, choice: found.append(case.key()), seed=seed)
        return found

    assert keys(5) == keys(5)
    assert keys(5) != keys(6)


def test_a_failure_ends_the_search_quietly(plan: Plan) -> None:
    """After ``SearchFailed`` no further case runs, though Hypothesis asks for the same one again."""
    seen: list[str] = []

    def note(case: Case, choice: Mapping[str, Any]) -> float | None:
        seen.append(case.key())
        if len(seen) == 4:
            raise search.SearchFailed
        return 0.5

    run(plan, note)
    assert len(seen) == 4


def test_an_exception_of_another_kind_comes_through(plan: Plan) -> None:
    """An error of the spec raised while searching is not swallowed."""

    def note(case: Case, choice: Mapping[str, Any]) -> float | None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(plan, note)


def test_no_cases_and_no_phases_mean_no_search(plan: Plan) -> None:
    """A budget of zero and ``@settings(phases=[explicit])`` draw nothing."""
    note: Any = lambda case, choice: pytest.fail("nothing was asked for")  # noqa: E731
    assert run(plan, note, cases=0) is None
    assert run(plan, note, outer_test(settings(phases=[Phase.explicit]))) is None


def test_pools_hold_a_few_distinct_values_the_simplest_first(make_spec: Any) -> None:
    """Six at most, no two with the same repr, the same for the same seed."""
    spec = make_spec({"k": st.integers(0, 1000), "flag": st.booleans(), "l": st.lists(st.integers(), max_size=2)})
    found = search.pools(spec, 3)
    assert found == search.pools(spec, 3)
    assert found["k"][0] == 0
    assert len(set(found["k"])) == len(found["k"]) == search.POOL_SIZE
    assert set(found["flag"]) == {True, False}


def test_settings_on_the_test_are_in_force() -> None:
    """The number of cases, the seed and the phases come from the user's own decorators."""
    assert search.max_examples(outer_test()) is None
    assert search.max_examples(outer_test(settings(max_examples=7))) == 7
    assert search.forced_seed(outer_test(hypothesis_seed(9))) == 9
    assert search.wants_phase(outer_test(), "shrink")
    assert not search.wants_phase(outer_test(settings(phases=[Phase.generate])), "shrink")


def test_examples_are_read_in_the_order_in_which_they_are_written() -> None:
    """The uppermost ``@example`` comes first."""

    @example(rows=1)
    @example(rows=2)
    def test(rows: int) -> None: ...

    adopted = lambda: None  # noqa: E731
    search.adopt(adopted, test)
    assert search.explicit_examples(adopted) == [{"rows": 1}, {"rows": 2}]


def test_the_plugin_of_hypothesis_sees_a_hypothesis_test() -> None:
    """An adopted test has what Hypothesis's pytest plugin looks for, and lets fixtures through."""
    adopted = outer_test(settings(max_examples=7))
    assert is_hypothesis_test(adopted)
    search.tolerate_fixtures(adopted)
    assert HealthCheck.function_scoped_fixture in search.user_settings(adopted).suppress_health_check
    assert search.max_examples(adopted) == 7

    @given(st.integers())
    def ours(n: int) -> None: ...

    assert is_hypothesis_test(ours)
