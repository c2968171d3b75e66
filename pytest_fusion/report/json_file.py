"""``--fusion-json``: every record of a run in one strict JSON file, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pytest_fusion.errors import FusionError
from pytest_fusion.report.plain_json import plain
from pytest_fusion.report.record import SCHEMA, TestRecord
from pytest_fusion.report.report_paths import replace_text

_FIELDS = frozenset(field.name for field in fields(TestRecord))


def document(records: Sequence[TestRecord], environment: Mapping[str, Any]) -> dict[str, Any]:
    """``{"schema": 1, "environment": {...}, "tests": [...]}``; keys may be added later, never renamed."""
    return {
        "schema": SCHEMA,
        "environment": plain(environment),
        "tests": [plain(record.as_json()) for record in records],
    }


def write_json(path: Path, records: Sequence[TestRecord], environment: Mapping[str, Any]) -> None:
    """Replace ``path`` with the document. Raises :class:`FusionError` when it cannot be written."""
    replace_text(path, json.dumps(document(records, environment), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> tuple[list[TestRecord], dict[str, Any]]:
    """The records and the environment of a file that :func:`write_json` wrote.

    Keys that this version does not know are dropped, so that an older version reads a newer file of the same schema.
    Raises :class:`FusionError` for a file that is missing, damaged, or of another schema.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FusionError(f"cannot read {path} ({error.strerror or error}); write one with --fusion-json") from None
    except ValueError as error:
        raise FusionError(f"{path} is not JSON ({error}); it may be cut short: write it again") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise FusionError(f'{path} has no "schema" key, so --fusion-json did not write it')
    if data["schema"] != SCHEMA:
        raise FusionError(
            f"{path} has schema {data['schema']!r}, and this version reads {SCHEMA}; "
            "read it with the version of pytest-fusion that wrote it"
        )
    try:
        records = [TestRecord.from_json({k: v for k, v in test.items() if k in _FIELDS}) for test in data["tests"]]
        return records, dict(data["environment"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FusionError(f"{path} has schema {SCHEMA} but not its shape ({error!r}); write it again") from None
