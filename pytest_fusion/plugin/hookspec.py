"""The hooks by which other plugins and ``conftest.py`` files extend this one; see ``docs/extending.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fusion.errors import FusionError
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec.values import extend_profiles

if TYPE_CHECKING:
    from pytest_fusion.checks.check import Check
    from pytest_fusion.spec.values import Function, ValueProfile


def pytest_fusion_checks() -> Iterable[Check]:  # type: ignore[empty-body]
    """Return checks that run, after ours, on cases that passed so far.

    Called once, before collection. The name of another check is an error.
    """


def pytest_fusion_value_profiles() -> Mapping[str, ValueProfile | Function]:  # type: ignore[empty-body]
    """Return value profiles by the name that ``tensor(..., values="name")`` uses.

    A profile is one of ``pytest_fusion.values`` or a function of ``(shape, dtype, generator)``. Called once, before
    collection. The name of another profile is an error.
    """


def pytest_fusion_reports() -> Iterable[Callable[[Sequence[TestRecord], Mapping[str, Any]], None]]:  # type: ignore[empty-body]
    """Return reports: functions of the records of all tests and of the environment.

    Called at the end of the run, in the process that prints.
    """


Report = Callable[[Sequence[TestRecord], Mapping[str, Any]], None]


def install(config: pytest.Config) -> None:
    """Adds the checks and value profiles of plugins to this process. Raises ``FusionError`` for a taken name."""
    profiles = list(chain.from_iterable(found.items() for found in config.hook.pytest_fusion_value_profiles()))
    extend_profiles(profiles)
    if checks := list(chain.from_iterable(config.hook.pytest_fusion_checks())):
        from pytest_fusion.checks import registry

        registry.extend(checks)
        config.add_cleanup(lambda: registry.extend([]))
    config.add_cleanup(lambda: extend_profiles([]))


def reports(config: pytest.Config) -> list[Report]:
    return list(chain.from_iterable(config.hook.pytest_fusion_reports()))


def write(found: Sequence[Report], records: Sequence[TestRecord], environment: Mapping[str, Any]) -> None:
    """Call every report. Raises ``FusionError`` for one that raises."""
    for report in found:
        try:
            report(records, environment)
        except Exception as error:
            name = getattr(report, "__name__", type(report).__name__)
            raise FusionError(f"the report {name} raised {type(error).__name__}: {error}") from error
