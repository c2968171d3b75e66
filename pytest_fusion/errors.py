"""Every exception that pytest-fusion raises on purpose; imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FusionError(Exception):
    """Base of all errors that the user can correct: a wrong spec, option or file."""


class SpecError(FusionError):
    """A spec contradicts itself or the functions it names; raised at collection."""


class ReplayError(FusionError):
    """A replay file is damaged, foreign, or was written for another spec."""


class BaselineError(FusionError):
    """A baseline file is damaged, foreign, newer than this version, of another test, or cannot be written."""


class CanaryError(FusionError):
    """A canary is set up wrongly, or cannot do what was requested."""


class UnsupportedTritonError(FusionError):
    """The interpreter of the installed Triton is not one that this package can correct."""


class NeedsCudaError(FusionError):
    """An interpreted kernel needs a CUDA device, so it cannot be judged on a machine without one."""


class NotModelledError(FusionError, NotImplementedError):
    """The interpreter has no model of what a kernel needs, which is no fault of the kernel."""


class TooManyProgramsError(FusionError):
    """A launch in the interpreter has more programs than the case may cost."""


class GridTooLargeError(FusionError, ValueError):
    """A launch on more programs along an axis of the grid than CUDA has there."""


class MemoryFinding(FusionError):
    """An interpreted kernel accessed memory that it must not access; ``finding`` has the facts (``Finding``).

    The access did not happen: nothing was changed by it.
    """

    def __init__(self, message: str, finding: Any = None) -> None:
        super().__init__(message)
        self.finding = finding


class FusionFailure(AssertionError):
    """A fused kernel failed a check.

    Attributes are plain data, so that the failure survives a process boundary:
    ``check`` is the check's name (``"values"``), ``case`` the smallest failing case as a JSON-like
    dict, ``cause`` a short stable slug or ``None``, ``replay`` the path of the replay file or ``None``.
    """

    def __init__(
        self,
        message: str,
        *,
        check: str,
        case: Mapping[str, Any] | None = None,
        cause: str | None = None,
        replay: str | None = None,
    ) -> None:
        super().__init__(message)
        self.check = check
        self.case = dict(case) if case is not None else None
        self.cause = cause
        self.replay = replay
