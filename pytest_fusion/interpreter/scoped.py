"""State that holds for the duration of a ``with`` block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def holding(state: object, **values: Any) -> Iterator[None]:
    """Set these attributes of ``state``, and restore the earlier values afterwards."""
    before = {name: getattr(state, name) for name in values}
    for name, value in values.items():
        setattr(state, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(state, name, value)


@contextmanager
def replaced(module: str, owner: str, method: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Call ``replacement(upstream, self, args, kwargs)`` for a method of an imported class; does nothing without it."""
    class_ = getattr(sys.modules.get(module), owner, None)
    upstream = getattr(class_, method, None)
    if upstream is None:
        yield
        return

    def stand_in(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(upstream, self, args, kwargs)

    with holding(class_, **{method: stand_in}):
        yield


@contextmanager
def listed(entries: list[T], entry: T) -> Iterator[T]:
    """Append ``entry`` to ``entries``, and remove that very object afterwards."""
    entries.append(entry)
    try:
        yield entry
    finally:
        # Blocks may end in another order than they began, and entries may be equal to each other.
        del entries[max(at for at, one in enumerate(entries) if one is entry)]
