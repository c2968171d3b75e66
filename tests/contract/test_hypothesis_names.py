"""The private names of Hypothesis that the search and the pinned cases rest on are there and mean what they did."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import core, example, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.statistics import collector


def test_decorators_leave_their_marks_on_the_function() -> None:
    """``@settings``, ``@seed`` and ``@example`` set the attributes that are carried over to the collected test."""

    @settings(max_examples=7)
    @hypothesis_seed(9)
    @example(1)
    @given(st.integers())
    def test(n: int) -> None: ...

    marked: Any = test
    assert marked._hypothesis_internal_use_settings.max_examples == 7
    assert marked._hypothesis_internal_use_seed == 9
    assert marked._hypothesis_internal_settings_applied
    assert marked.is_hypothesis_test


def test_examples_are_kept_innermost_first_with_their_keywords() -> None:
    """``hypothesis_explicit_examples`` holds objects with ``kwargs``, the lowest decorator first."""

    @example(n=1)
    @example(n=2)
    def test(n: int) -> None: ...

    found: Any = test
    assert [dict(one.kwargs) for one in found.hypothesis_explicit_examples] == [{"n": 2}, {"n": 1}]


def test_settings_may_stand_above_a_function_that_only_looks_like_a_test() -> None:
    """A function that says that it is a Hypothesis test takes ``@settings`` and ``@seed`` from above."""

    def test() -> None: ...

    looks: Any = test
    looks.is_hypothesis_test = True
    settings(max_examples=5)(looks)
    assert looks._hypothesis_internal_use_settings.max_examples == 5
    assert looks._hypothesis_internal_settings_applied


def test_the_digest_decides_where_a_failure_is_stored() -> None:
    """``_hypothesis_internal_add_digest`` on the inner test separates the database entries of two tests."""

    def failing(digest: bytes) -> set[bytes]:
        database = InMemoryExampleDatabase()

        @settings(database=database, max_examples=5, derandomize=False)
        @given(st.integers())
        def test(n: int) -> None:
            raise AssertionError

        marked: Any = test
        marked.hypothesis.inner_test._hypothesis_internal_add_digest = digest
        with contextlib.suppress(AssertionError):
            test()
        return set(database.data)

    first, same, other = failing(b"one"), failing(b"one"), failing(b"two")
    assert first
    assert first == same
    assert not first & other


def test_the_collector_receives_statistics_and_can_be_silenced() -> None:
    """``collector.with_value`` takes a callback for what a run found, and None for nobody."""
    heard: list[dict[str, Any]] = []

    @settings(database=None, max_examples=3)
    @given(st.integers())
    def test(n: int) -> None: ...

    with collector.with_value(heard.append):  # type: ignore[arg-type]
        test()
    assert len(heard) == 1
    with collector.with_value(None):
        test()
    assert len(heard) == 1


def test_the_forced_seed_of_the_command_line_has_a_place() -> None:
    """``--hypothesis-seed`` lands in ``core.global_force_seed``, which is None or a seed."""
    assert hasattr(core, "global_force_seed")


def test_a_strategy_is_known_by_its_base_class() -> None:
    """Strategies of every kind derive from a ``SearchStrategy`` defined inside Hypothesis."""
    for strategy in (st.integers(), st.integers().map(str), st.builds(dict), st.just(1), st.none() | st.integers()):
        assert any(
            base.__module__.startswith("hypothesis.") and base.__name__ == "SearchStrategy"
            for base in type(strategy).__mro__
        )
