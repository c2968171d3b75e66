"""The test that runs now: its request and mode, made by the plugin, and the records that it left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_fusion.engine.modes import Mode
    from pytest_fusion.engine.request import Request
    from pytest_fusion.report.record import TestRecord


@dataclass(slots=True)
class Active:
    """One running test. Request and mode are made on first use, since that imports torch."""

    make_request: Callable[[], Request]
    choose_mode: Callable[[], Mode]
    records: list[TestRecord] = field(default_factory=list)


_stack: list[Active] = []


def push(active: Active) -> None:
    _stack.append(active)


def pop() -> None:
    _stack.pop()


def current() -> Active | None:
    """The running test's, or ``None`` outside pytest."""
    return _stack[-1] if _stack else None
