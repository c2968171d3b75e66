"""The content of a baseline file: required keys, keys of other versions, and a text that suits diffs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_fusion.bench.baseline.row import CONTENT, Key, Row
from pytest_fusion.errors import BaselineError

SCHEMA = 1
TOOL = "pytest-fusion baseline"
_OWN = frozenset(("schema", "tool", "test", "device", "environments", "rows"))
_AGAIN = "restore it from version control, or delete it and make it again with --fusion-update new"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The rows of one test on one device class. ``raw`` rows and unknown keys of the file (``more``) are written back,
    so that a newer version of the same schema, or a person with a comment, loses nothing."""

    test: str
    device: str
    rows: Mapping[Key, Row] = field(default_factory=dict)
    raw: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


def decode(text: str, path: Path) -> Baseline:
    """The baseline in ``text``. Raises ``BaselineError``, naming ``path``, for any other file or schema."""
    try:
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        conflict = "it holds the marks of a merge conflict" if "<<<<<<<" in text else "was it cut off?"
        raise BaselineError(f"{path} is not JSON ({error}); {conflict}: {_AGAIN}") from None
    if not isinstance(data, dict) or data.get("tool") != TOOL:
        raise BaselineError(
            f"{path} is not a baseline of pytest-fusion; move it out of the folder, or name another with "
            "--fusion-baseline DIR"
        )
    schema = data.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        newer = isinstance(schema, int) and schema > SCHEMA
        raise BaselineError(
            f"{path} has schema {schema!r}, and this version reads {SCHEMA}; "
            + ("use the version of pytest-fusion that wrote it, or a newer one" if newer else _AGAIN)
        )
    try:
        return _content(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise BaselineError(f"{path} has schema {SCHEMA} but not its shape ({problem}); {_AGAIN}") from None


def encode(baseline: Baseline) -> str:
    """The file's text, for reviews: sorted, one fact a line, lists of numbers on one line."""
    environments: dict[str, dict[str, str]] = {}
    rows = []
    for key, row in sorted(baseline.rows.items(), key=_order):
        environment = dict(sorted(row.environment.items()))
        name = hashlib.sha256(json.dumps(environment).encode()).hexdigest()[:8] if environment else ""
        if environment:
            environments[name] = environment
        rows.append({**_unread(baseline.raw.get(key, {}), row), **({"environment": name} if name else {})})
    content = {
        "tool": TOOL,
        "schema": SCHEMA,
        "test": baseline.test,
        "device": baseline.device,
        **dict(sorted(baseline.more.items())),
        "environments": dict(sorted(environments.items())),
        "rows": rows,
    }
    return "\n".join(_lines(content, "")) + "\n"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of ``pairs``. A merge can leave a key twice, and the last one would win silently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = sorted({key for key, _ in pairs if sum(other == key for other, _ in pairs) > 1})
        raise ValueError(f"the key {twice[0]!r} stands there twice")
    return found


def _content(data: Mapping[str, Any]) -> Baseline:
    test, device, environments = data["test"], data["device"], data["environments"]
    rows: dict[Key, Row] = {}
    raw: dict[Key, Mapping[str, Any]] = {}
    for entry in data["rows"]:
        name = entry.get("environment")
        environment = environments[name] if name else {}
        row = Row.from_json({**entry, "test": test, "device": device, "environment": environment})
        if row.key in rows:
            raise ValueError(f"two rows are of {row.case} {row.role}")
        rows[row.key], raw[row.key] = row, entry
    return Baseline(test, device, rows, raw, {key: value for key, value in data.items() if key not in _OWN})


def _unread(raw: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """The row's content: the stored one if nothing changed, else with the keys that are not ours."""
    content = row.content()
    if raw and Row.from_json({**raw, "test": "", "device": "", "environment": {}}).content() == content:
        return dict(raw)
    return {**content, **{key: value for key, value in sorted(raw.items()) if key not in (*CONTENT, "environment")}}


def _order(item: tuple[Key, Row]) -> tuple[str, str]:
    """The sort key: by case, judged rows before those that they are compared with."""
    key, row = item
    return key.case, f"{0 if row.judged else 1} {key.role}"


def _lines(value: Any, indent: str) -> Iterable[str]:
    """JSON with objects over several lines and lists of plain values on one."""
    if isinstance(value, dict) and value:
        yield "{"
        yield from _items([(f"{json.dumps(key)}: ", item) for key, item in value.items()], indent + " ")
        yield indent + "}"
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        yield "["
        yield from _items([("", item) for item in value], indent + " ")
        yield indent + "]"
    else:
        yield json.dumps(value, allow_nan=False)


def _items(items: list[tuple[str, Any]], indent: str) -> Iterable[str]:
    for index, (head, item) in enumerate(items):
        first, *rest = _lines(item, indent)
        lines = [indent + head + first, *rest]
        lines[-1] += "," if index < len(items) - 1 else ""
        yield from lines
