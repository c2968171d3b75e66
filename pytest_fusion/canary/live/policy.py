"""`Policy`: how far a candidate may go (a `Mode`), what comparing it may cost, and when it is rolled back."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from pytest_fusion.errors import CanaryError
from pytest_fusion.spec.promises import Tolerance
from pytest_fusion.spec.wording import checks_words, did_you_mean

STATES = ("off", "shadow", "route", "full")


@dataclass(frozen=True, slots=True)
class Mode:
    """How far the candidate may go; ``share`` of the calls (0 to 1) is what ``route`` gives it."""

    state: str
    share: float = 0.0

    @classmethod
    def parse(cls, text: str, share: float) -> Mode:
        """The mode of ``"shadow"``, ``"route 0.05"``, ...; ``share`` is the default. Raises ``CanaryError``."""
        word, _, rest = str(text).strip().lower().replace(":", " ").replace("=", " ").partition(" ")
        rest = rest.strip()
        if word not in STATES:
            raise CanaryError(f"unknown canary state {str(text)!r}{did_you_mean(word, STATES)}")
        if rest and word != "route":
            raise CanaryError(f"canary state {str(text)!r}: only route takes a share, as in 'route 0.05'")
        if word != "route":
            return cls(word, 1.0 if word == "full" else 0.0)
        try:
            part = float(rest) if rest else share
        except ValueError:
            part = -1.0
        if not 0 <= part <= 1:
            raise CanaryError(f"canary state {str(text)!r}: the share must be from 0 to 1, as in 'route 0.05'")
        return cls(word, part)

    @property
    def reach(self) -> tuple[int, float]:
        """A key to compare modes by: the most cautious one has the smallest."""
        return STATES.index(self.state), self.share

    def __str__(self) -> str:
        return f"route {self.share:g}" if self.state == "route" else self.state


OFF = Mode("off")


_SHARES = ("share", "shadow", "verify", "timed", "gpu_share")
_POSITIVE = ("timeout_s", "memory_mib", "interval_s", "stale_s", "log_mib")
_COUNTS = ("trip_after", "trip_window")


@checks_words(CanaryError)
@dataclass(frozen=True, slots=True)
class Policy:
    """What a canary may do. Raises :class:`~pytest_fusion.errors.CanaryError` for impossible values.

    ``state`` is the first state: ``"off"``, ``"shadow"``, ``"route"`` or ``"full"``. Shares are of calls, 0 to 1:
    ``share`` goes to the candidate in ``route``, ``shadow`` is compared in ``shadow``, ``verify`` of the calls that the
    candidate served is compared afterwards. ``timed`` of the calls compared in shadow are timed: both kernels run once
    more, on copies. All this takes at most ``gpu_share`` of a GPU's time on average; 1 is no limit.

    ``by`` is the unit of routing: each request, or the process (named by ``replica``, by default host and process id).
    ``rollout`` and ``salt`` are part of the hash: in all processes the same, or the shares differ. A trip holds for its
    ``rollout``.

    ``writes`` names the arguments that either kernel writes, ``()`` for none. With ``None`` (unknown) every routed call
    copies all its tensors, to fall back on the incumbent. Contents of ``scratch`` arguments do not matter afterwards.
    ``tolerance`` is the allowed difference between the kernels; ``None`` allows about four roundings of the dtype.

    ``trip_after`` failures in ``trip_window`` runs of the candidate roll it back. ``timeout_s`` limits one run,
    compilation included, ``memory_mib`` the copies of a call. ``file`` is read every ``interval_s``; unreadable for
    ``stale_s``, it means off. ``directory`` gets the event log (at most twice ``log_mib``), the mark of a trip and, in
    ``finds``, files that reproduce up to 20 disagreements of each class of shapes, with ``keep_tensors`` their tensors
    too.
    """

    state: str = "shadow"
    share: float = 0.01
    shadow: float = 0.01
    verify: float = 0.01
    timed: float = 0.25
    gpu_share: float = 0.01
    by: str = "request"
    replica: str | None = None
    rollout: str = "1"
    salt: str = ""
    writes: tuple[str, ...] | None = None
    scratch: tuple[str, ...] = ()
    tolerance: Tolerance | None = None
    trip_after: int = 3
    trip_window: int = 1000
    timeout_s: float = 120.0
    memory_mib: float = 64.0
    interval_s: float = 1.0
    file: str | os.PathLike[str] | None = None
    stale_s: float = 600.0
    directory: str | os.PathLike[str] | None = None
    log_mib: float = 16.0
    keep_tensors: bool = False

    def __post_init__(self) -> None:
        for name in _SHARES:
            if not _number(getattr(self, name)) or not 0 <= getattr(self, name) <= 1:
                raise self._wrong(name, "a share of calls from 0 to 1 (1 % is 0.01)")
        for name in _POSITIVE:
            if not _number(getattr(self, name)) or getattr(self, name) <= 0:
                raise self._wrong(name, "a finite number above 0")
        for name in _COUNTS:
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise self._wrong(name, "a whole number of 1 or more")
        if self.trip_after > self.trip_window:
            raise self._wrong("trip_after", f"at most trip_window={self.trip_window}, or it could never be reached")
        if self.by not in ("request", "process"):
            raise self._wrong("by", "'request' or 'process'")
        for name in ("writes", "scratch"):
            if isinstance(getattr(self, name), str):
                raise self._wrong(name, f"a tuple of argument names, as in {name}=({getattr(self, name)!r},)")
        if not isinstance(self.keep_tensors, bool):
            raise self._wrong("keep_tensors", "True or False")
        if self.tolerance is not None and not isinstance(self.tolerance, Tolerance):
            raise self._wrong("tolerance", "None or a pytest_fusion.Tolerance")
        _ = self.mode

    @property
    def mode(self) -> Mode:
        """The first mode of a canary."""
        return Mode.parse(self.state, self.share)

    def _wrong(self, name: str, expected: str) -> CanaryError:
        return CanaryError(f"Policy({name}={getattr(self, name)!r}): expected {expected}")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
