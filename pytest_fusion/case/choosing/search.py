"""Random search with Hypothesis, imported only here: it draws choices, not elements, and aims at large errors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, settings, target
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from hypothesis.statistics import collector

from pytest_fusion.case import counter_random, regimes
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.make import ImpossibleCase
from pytest_fusion.case.plan import Plan, build
from pytest_fusion.case.stated import misfit
from pytest_fusion.errors import ReplayError, SpecError
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.inputs import StrategySpec, unwrap
from pytest_fusion.spec.wording import brief

# Distinct samples of a user's strategy that the covering phase combines with all else.
POOL_SIZE = 6
_HYPOTHESIS_DEFAULT_EXAMPLES = 100
# What @settings, @seed and @example leave on the function they decorate.
_CARRIED_OVER = (
    "_hypothesis_internal_settings_applied",
    "_hypothesis_internal_use_seed",
    "hypothesis_explicit_examples",
)
_UNSUPPRESSED = (
    HealthCheck.function_scoped_fixture,  # a fixture's value is passed through unchanged to every case
    HealthCheck.differing_executors,
    HealthCheck.too_slow,  # as interpreted kernels are
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,  # impossible sizes are counted and reported by the campaign itself
)


class SearchFailed(Exception):
    """Raised inside Hypothesis so that it records the choice in its database."""


def adopt(outer: Any, inner: Any) -> None:
    """Make ``outer`` a Hypothesis test for its pytest plugin, with the settings, seed and examples on ``inner``."""
    outer.is_hypothesis_test = True
    outer.hypothesis = SimpleNamespace(inner_test=inner)
    for name in _CARRIED_OVER:
        if hasattr(inner, name):
            setattr(outer, name, getattr(inner, name))
    outer._hypothesis_internal_use_settings = getattr(inner, "_hypothesis_internal_use_settings", settings.default)


def stand_in() -> Any:
    """A test function with Hypothesis' default settings, for a spec that is judged without one."""

    def outer() -> None: ...

    adopt(outer, outer)
    return outer


def tolerate_fixtures(outer: Any) -> None:
    """Allow function-scoped fixtures, whatever ``@settings`` above the test says."""
    current = getattr(outer, "_hypothesis_internal_use_settings", None) or settings.default
    assert current is not None
    outer._hypothesis_internal_use_settings = settings(
        current, suppress_health_check=set(current.suppress_health_check) | set(_UNSUPPRESSED)
    )


def user_settings(outer: Any) -> settings:
    """The settings that apply: those on the test, else the loaded profile's."""
    if getattr(outer, "_hypothesis_internal_settings_applied", False):
        chosen = outer._hypothesis_internal_use_settings
        assert isinstance(chosen, settings)
        return chosen
    assert settings.default is not None
    return settings.default


def max_examples(outer: Any) -> int | None:
    """The number of cases that the user set; ``None`` for Hypothesis's own default."""
    chosen = user_settings(outer)
    applied = getattr(outer, "_hypothesis_internal_settings_applied", False)
    if applied or chosen.max_examples != _HYPOTHESIS_DEFAULT_EXAMPLES:
        return chosen.max_examples
    return None


def wants_phase(outer: Any, name: str) -> bool:
    return Phase[name] in user_settings(outer).phases


def forced_seed(outer: Any) -> Any:
    """``@seed`` on the test or ``--hypothesis-seed``, or ``None``."""
    from hypothesis import core

    own = getattr(outer, "_hypothesis_internal_use_seed", None)
    return own if own is not None else core.global_force_seed


def explicit_examples(outer: Any) -> list[dict[str, Any]]:
    """The keywords of every ``@example(...)`` on the test, in source order."""
    found = getattr(outer, "hypothesis_explicit_examples", ())
    return [dict(example.kwargs) for example in reversed(list(found))]


def pools(spec: FusionSpec, seed: int) -> dict[str, tuple[Any, ...]]:
    """A few distinct values of every drawn input, the simplest first. Raises ``SpecError`` where there are none."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, declared in spec.inputs.items():
        if isinstance(inner := unwrap(declared), StrategySpec):
            try:
                found[name] = _sample(inner.strategy, counter_random.mix(seed, name))
            except Exception as error:
                raise SpecError(f"{spec.name}: no value could be drawn for input {name!r}: {brief(error)}") from error
    return found


def _sample(strategy: Any, seed: int) -> tuple[Any, ...]:
    found: dict[str, Any] = {}

    @hypothesis_seed(seed)
    @settings(
        database=None,
        max_examples=4 * POOL_SIZE,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(strategy)
    def collect(value: Any) -> None:
        if len(found) < POOL_SIZE:
            found.setdefault(repr(value), value)

    with collector.with_value(None):  # these draws are not the user's test cases
        collect()
    return tuple(found.values())


@st.composite
def choices(draw: st.DrawFn, plan: Plan) -> tuple[dict[str, Any], int]:
    """A choice of levels and a seed for :func:`~pytest_fusion.case.plan.build`."""
    choice: dict[str, Any] = {}
    labels = st.sampled_from(list(plan.size_classes))
    # As in the covering phase: tensors without a choice are contiguous at the start of their storage.
    alike = draw(st.sampled_from((False, False, True)))
    for factor, levels in plan.factors.items():
        kind, _, name = factor.partition(" ")
        if alike and kind in ("layout", "offset"):
            continue
        if kind == "dim":
            least = max(1, plan.spec.bound(name).min)
            classes = st.sampled_from(levels) if name in plan.spec.batch_names else labels
            choice[factor] = draw(st.one_of(classes, st.integers(least, least + 99)))
        elif kind == "offset":
            choice[factor] = draw(st.integers(0, 7))
        elif kind == "values":
            special = any(regimes.is_special(level) for level in levels)
            choice[factor] = draw(st.sampled_from(regimes.names(finite=not special)))
        elif kind == "drawn":
            inner = unwrap(plan.spec.inputs[name])
            assert isinstance(inner, StrategySpec)
            choice[f"value {name}"] = draw(inner.strategy)
        else:
            choice[factor] = draw(st.sampled_from(list(levels)))
    return choice, draw(st.integers(0, 2**31 - 1))


def search(
    plan: Plan,
    run: Callable[[Case, Mapping[str, Any]], float | None],
    *,
    outer: Any,
    cases: int,
    seed: int | None,
    database_key: str | None,
    save: bool = True,
) -> dict[str, Any] | None:
    """Run up to ``cases`` random cases; ``run`` returns log2(error / allowed), or ``None`` for nothing to aim at.

    ``run`` raises ``SearchFailed`` for a failing case, which ends the search; the caller stores the failure. Without
    ``save``, Hypothesis's database is neither read nor written. Returns Hypothesis's statistics.
    """
    chosen = user_settings(outer)
    phases = [phase for phase in chosen.phases if phase in (Phase.reuse, Phase.generate, Phase.target)]
    if cases <= 0 or not phases:
        return None
    known: dict[str, bool] = {}
    statistics: list[dict[str, Any]] = []

    def body(drawn: tuple[dict[str, Any], int]) -> None:
        choice, case_seed = drawn
        try:
            case = build(plan, choice, case_seed)
        except ImpossibleCase:
            return
        key = case.key()
        # Hypothesis runs a failing case again to detect flakiness; the first verdict stands.
        if known.get(key):
            raise SearchFailed
        try:
            score = run(case, choice)
        except SearchFailed:
            known[key] = True
            raise
        if score is not None:
            target(score, label="log2(error / allowed)")

    test: Any = given(choices(plan))(body)
    test = settings(
        chosen,
        max_examples=cases,
        deadline=None,
        phases=phases,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet if chosen.verbosity is Verbosity.normal else chosen.verbosity,
        suppress_health_check=list(HealthCheck),
        database=chosen.database if save else None,
    )(test)
    if seed is not None:
        test = hypothesis_seed(seed)(test)
    if database_key is not None:
        test.hypothesis.inner_test._hypothesis_internal_add_digest = database_key.encode()
    try:
        with collector.with_value(statistics.append):  # type: ignore[arg-type]  # typed by its default, None
            test()
    except SearchFailed:
        pass
    return statistics[-1] if statistics else None


def publish_statistics(statistics: dict[str, Any] | None) -> None:
    """Hand statistics that came out of a child process to Hypothesis's pytest plugin."""
    callback = collector.value
    if statistics is not None and callback is not None:
        callback(statistics)


class Known:
    """The failing cases of one test. Empty where the settings have no database or omit the reuse phase."""

    def __init__(self, spec: FusionSpec, outer: Any, nodeid: str) -> None:
        self._spec = spec
        # A digest, because a file-based database names files by the key.
        self._key = hashlib.sha256(f"pytest-fusion {nodeid}".encode()).digest()
        self._database = user_settings(outer).database if wants_phase(outer, "reuse") else None
        self.cases: tuple[Case, ...] = tuple(self._fetch())

    def _fetch(self) -> list[Case]:
        """Cases that fit the present spec; others are dropped from the database."""
        found = []
        for data in sorted(self._database.fetch(self._key)) if self._database is not None else ():
            try:
                case = Case.from_json(json.loads(data))
            except (ReplayError, ValueError):
                case = None
            if case is not None and misfit(self._spec, case) is None:
                found.append(case)
            elif self._database is not None:
                self._database.delete(self._key, data)
        return found

    def update(self, failing: Case | None, *, all_ran: bool) -> None:
        """Store ``failing``; delete the others if they ran and did not fail."""
        if self._database is None:
            return
        for case in self.cases if all_ran else ():
            if case != failing:
                self._database.delete(self._key, _bytes(case))
        if failing is not None:
            self._database.save(self._key, _bytes(failing))


def _bytes(case: Case) -> bytes:
    return json.dumps(case.as_json(), sort_keys=True).encode()
