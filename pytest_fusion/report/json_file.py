"""``--fusion-json``: every record of a run in one strict JSON file, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pytest_fusion.errors import FusionError
from pytest_fusion.report.record import SCHEMA, TestRecord
from pytest_fusion.report.report_paths import replace_text
from pytest_fusion.spec.wording import words

_FIELDS = frozenset(field.name for field in fields(TestRecord))


def document(records: Sequence[TestRecord], environment: Mapping[str, Any]) -> dict[str, Any]:
    """``{"schema": 1, "environment": {...}, "tests": [...]}``; keys may be added, not renamed."""
    return {
        "schema": SCHEMA,
        "environment": plain(environment),
        "tests": [plain(record.as_json()) for record in records],
    }


def write_json(path: Path, records: Sequence[TestRecord], environment: Mapping[str, Any]) -> None:
    """Replaces ``path`` with the document. Raises :class:`FusionError` if it cannot be written."""
    replace_text(path, json.dumps(document(records, environment), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> tuple[list[TestRecord], dict[str, Any]]:
    """The records and the environment of a file of :func:`write_json`, without unknown keys, so that an older version
    reads newer files of the same schema. Raises :class:`FusionError` for a missing, damaged or other file."""
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
        records = [TestRecord(**{k: v for k, v in test.items() if k in _FIELDS}) for test in data["tests"]]
        return records, dict(data["environment"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FusionError(f"{path} has schema {SCHEMA} but not its shape ({error!r}); write it again") from None


Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def plain(value: Any) -> Any:
    """``value`` as a new :data:`Plain`: numpy and torch scalars become Python numbers (one ``numpy.float64`` ends a run
    of pytest-xdist with execnet's ``DumpError``), sets sorted lists, dataclasses dicts, other objects text. Non-finite
    floats become ``"nan"``, ``"inf"``, ``"-inf"``, which strict JSON lacks; lone surrogates (undecodable bytes of a
    child's stderr), which cannot be written as UTF-8, are escaped."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, str):
        return words(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(map(plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    # An object of numpy or torch without a dimension holds a number.
    scalar = getattr(value, "ndim", None) == 0 and callable(getattr(value, "tolist", None))
    inner = value.tolist() if scalar else None
    return plain(inner) if isinstance(inner, bool | int | float | str) else words(value)
