"""What other plugins add: checks, value profiles and reports, handed on to those who use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import pytest

from pytest_fusion.errors import FusionError
from pytest_fusion.report.record import TestRecord
from pytest_fusion.spec import value_profiles

Report = Callable[[Sequence[TestRecord], Mapping[str, Any]], None]


def install(config: pytest.Config) -> None:
    """Make the checks and value profiles of plugins those of this process. Raises ``FusionError`` for a taken name."""
    profiles = list(chain.from_iterable(found.items() for found in config.hook.pytest_fusion_value_profiles()))
    value_profiles.extend(profiles)
    if checks := list(chain.from_iterable(config.hook.pytest_fusion_checks())):
        from pytest_fusion.checks import registry

        registry.extend(checks)
        config.add_cleanup(lambda: registry.extend([]))
    config.add_cleanup(lambda: value_profiles.extend([]))


def reports(config: pytest.Config) -> list[Report]:
    """The reports of plugins."""
    return list(chain.from_iterable(config.hook.pytest_fusion_reports()))


def write(found: Sequence[Report], records: Sequence[TestRecord], environment: Mapping[str, Any]) -> None:
    """Call every report. Raises ``FusionError`` for one that raises."""
    for report in found:
        try:
            report(records, environment)
        except Exception as error:
            name = getattr(report, "__name__", type(report).__name__)
            raise FusionError(f"the report {name} raised {type(error).__name__}: {error}") from error
