"""What a type checker is told of ``pytest_fusion.canary``, which is a folder and is called like a function."""

from __future__ import annotations

from typing import Final

from pytest_fusion.canary.recorder import record as _record
from pytest_fusion.canary.router import canary as _canary


class Entry:
    """``canary(...)`` and ``canary.record(...)``."""

    __call__ = staticmethod(_canary)
    record = staticmethod(_record)


canary: Final = Entry()
