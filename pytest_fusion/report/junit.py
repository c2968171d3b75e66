"""A few scalars for JUnit XML, through ``item.user_properties`` (its writer reads those of the teardown report)."""

from __future__ import annotations

from pytest_fusion.report.phrases import worst_ratio
from pytest_fusion.report.record import TestRecord


def properties(record: TestRecord) -> list[tuple[str, str | int | float]]:
    """``fusion_*`` names and values; what has no value is left out.

    Scalars alone: JUnit's writer turns a value into ``str(value)``, so a dict would be pasted whole into an attribute.
    """
    found: dict[str, str | int | float | None] = {
        "fusion_verdict": record.verdict,
        "fusion_cases": record.cases,
        "fusion_rejected": sum(record.rejected.values()),
        "fusion_failed_check": record.failed_check,
        "fusion_cause": record.cause,
        "fusion_worst_ratio": worst_ratio(record),
        "fusion_grade": record.grade,
        "fusion_replay": record.replay,
        "fusion_off": ", ".join(record.off) or None,
    }
    return [(name, value) for name, value in found.items() if value is not None]
