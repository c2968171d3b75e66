"""The hooks by which other plugins and ``conftest.py`` files extend this one; see ``docs/extending.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fusion.checks.check import Check
    from pytest_fusion.report.record import TestRecord
    from pytest_fusion.spec.values import Function, ValueProfile


def pytest_fusion_checks() -> Iterable[Check]:  # type: ignore[empty-body]
    """Return checks that run, after ours, on cases that passed so far.

    Called once, before collection. A name that another check has is an error.
    """


def pytest_fusion_value_profiles() -> Mapping[str, ValueProfile | Function]:  # type: ignore[empty-body]
    """Return value profiles by the name that ``tensor(..., values="name")`` uses.

    A profile is one of ``pytest_fusion.values`` or a function of ``(shape, dtype, generator)``. Called once, before
    collection. A name that another profile has is an error.
    """


def pytest_fusion_reports() -> Iterable[Callable[[Sequence[TestRecord], Mapping[str, Any]], None]]:  # type: ignore[empty-body]
    """Return reports: functions of the records of all tests and of the environment.

    Called at the end of the run, in the process that prints.
    """
