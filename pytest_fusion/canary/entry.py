"""What a type checker is told of ``pytest_fusion.canary``, which is a folder and is called like a function."""

from __future__ import annotations

from typing import Final

from pytest_fusion.canary.live.router import canary as _canary
from pytest_fusion.canary.recording.recorder import record as _record


class Entry:
    """``canary(...)`` and ``canary.record(...)``."""

    __call__ = staticmethod(_canary)
    record = staticmethod(_record)


canary: Final = Entry()
