"""The type of ``pytest_fusion.canary`` for type checkers: it is a folder, and it is called like a function."""

from __future__ import annotations

from typing import Final

from pytest_fusion.canary.live.router import canary as _canary
from pytest_fusion.canary.recording.recorder import record as _record


class Entry:
    """``canary(...)`` and ``canary.record(...)``."""

    __call__ = staticmethod(_canary)
    record = staticmethod(_record)


canary: Final = Entry()
