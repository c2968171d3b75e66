"""Sweeps over dtypes, seeds, kernels or causes: a few values run each time, the rest are slow or nightly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def sweep(
    names: str | Sequence[str],
    values: Iterable[Any],
    *,
    fast: int | Collection[str] = 1,
    ids: Callable[[Any], str] | Sequence[str] | None = None,
    rest: pytest.MarkDecorator = pytest.mark.slow,
) -> pytest.MarkDecorator:
    """As `pytest.mark.parametrize`; all values but the first ``fast``, or but those with an id in it, get ``rest``."""
    rows = list(values)
    known = rows if ids is None else [ids(value) for value in rows] if callable(ids) else list(ids)
    if not isinstance(fast, int) and (unknown := set(fast) - set(map(str, known))):
        raise ValueError(f"no parameter has the id {sorted(unknown)}")
    runs = [at < fast if isinstance(fast, int) else str(name) in fast for at, name in enumerate(known)]
    split = names.split(",") if isinstance(names, str) else names
    return pytest.mark.parametrize(
        names,
        [_row(value, len(split) > 1, [] if run else [rest]) for value, run in zip(rows, runs, strict=True)],
        ids=ids if ids is None else list(map(str, known)),
    )


def first_of_each(values: Iterable[T], kind: Callable[[T], object], name: Callable[[T], str] = str) -> set[str]:
    """The names of those that are the first of their kind."""
    first: dict[object, str] = {}
    for value in values:
        first.setdefault(kind(value), name(value))
    return set(first.values())


def _row(value: Any, several: bool, marks: list[pytest.MarkDecorator]) -> Any:
    return pytest.param(*value, marks=marks) if several else pytest.param(value, marks=marks)
