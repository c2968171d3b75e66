"""The seconds of a test by phase (kernel, reference, oracle, making tensors, the plugin) and by check."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pytest_fusion.run.pristine import perf_counter

# The base cost of a case: one call, the reference with its rounding runs, and their comparison.
FIRST = "values"
# Phases of the user's code, which may take long, and the least seconds between two reports of their ends.
_FOREIGN, _PULSE_S = frozenset({"fused", "reference"}), 1.0


def processor_s() -> float:
    """Seconds of the processor that this process and its ended children used, whatever else the machine does."""
    return sum(os.times()[:4])


@dataclass(slots=True)
class Share:
    """The cost of one check: wall ``seconds`` and ``calls`` of the kernel, backward passes included."""

    seconds: float = 0.0
    calls: int = 0


class Clock:
    """Adds up wall seconds per phase and check, without inner phases; ``pulse`` shows that calls end, once a second."""

    def __init__(self, pulse: Callable[[], None] | None = None) -> None:
        self._pulse, self._pulsed = pulse, perf_counter()
        self.seconds: dict[str, float] = {}
        self.checks: dict[str, Share] = {}
        # Seconds of each call of the kernel and each run of the reference since the last `forget`.
        self.calls: dict[str, list[float]] = {name: [] for name in sorted(_FOREIGN)}
        self._inner: list[float] = []
        self._check = FIRST

    def forget(self) -> None:
        """Forget the times of single calls."""
        for took in self.calls.values():
            took.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = perf_counter() - begun
            own = spent - self._inner.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + own
            share = self.checks.setdefault(self._check, Share())
            share.seconds += own
            if name == "fused":
                share.calls += 1
            if name in _FOREIGN:
                self.calls[name].append(own)
            if self._inner:
                self._inner[-1] += spent
            if self._pulse is not None and name in _FOREIGN and begun + spent - self._pulsed >= _PULSE_S:
                self._pulsed = begun + spent
                self._pulse()

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Charge the body to this check; a nested check has its own share."""
        before, self._check = self._check, name
        try:
            with self.phase("plugin"):
                yield
        finally:
            self._check = before
