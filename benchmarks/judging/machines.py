"""Machines to judge kernels on, made up: what their clocks, neighbours and timers do to pairs of times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
PAIRS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """How times of pairs scatter; all standard deviations are of log times.

    ``machine`` scales a whole session. ``drift`` is an AR(1) process over pairs. In ``throttled`` of all sessions the
    clock falls by ``step`` half way. ``jitter`` is of each time alone; ``outliers`` of all times are longer
    by ``outlier``.
    ``session`` moves the ratio of two different kernels from one session to the next on one GPU, ``unit`` from one GPU
    to another. ``side`` moves the ratio of two measurements in one session, whatever they are of: the order of buffers,
    an alignment.
    """

    name: str
    machine: float = 0.0
    drift: float = 0.0
    throttled: float = 0.0
    step: float = 0.08
    jitter: float = 0.01
    outliers: float = 0.0
    outlier: float = 0.30
    session: float = 0.0
    unit: float = 0.0
    side: float = 0.0


# The first is that of the simulation behind the defaults; the H200's are set so that ten A/A runs scatter as ten real
# ones did (-0.09 to +0.05 % of a 55 us softmax, -0.14 to -0.03 % of a 9.7 us one, -0.08 to +0.07 % of a 2.3 us relu).
CLOUD = Machine("shared", machine=0.05, drift=0.02, throttled=0.3, outliers=0.02, session=0.002, unit=0.02)
H200 = Machine(
    "H200, 55 us", machine=0.01, drift=0.002, jitter=0.002, outliers=0.01, session=0.0005, unit=0.005, side=0.0003
)
H200_SMALL = Machine(
    "H200, 2.3 us", machine=0.01, drift=0.005, jitter=0.003, outliers=0.01, session=0.001, unit=0.005, side=0.0004
)
ROUGH = Machine(
    "rough", machine=0.05, drift=0.05, throttled=0.5, jitter=0.05, outliers=0.05, session=0.005, unit=0.02, side=0.001
)
MACHINES = (H200, H200_SMALL, CLOUD, ROUGH)


@dataclass(frozen=True, slots=True)
class Session:
    """A visit to a machine: what stays the same for all that is measured in it."""

    machine: Machine
    rng: np.random.Generator

    def ratios(self, slowdown: float = 0.0, apart: float = 0.0, blocks: int = 20) -> list[float]:
        """Log ratios of ``blocks`` blocks of pairs; ``apart`` is what session and GPU do to the true ratio."""
        from pytest_fusion.bench.baseline.bootstrap import block_ratios

        count = blocks * PAIRS
        common = self._common(2 * count)
        noise = self.rng.normal(0, self.machine.jitter, 2 * count)
        noise += np.where(self.rng.random(2 * count) < self.machine.outliers, np.log1p(self.machine.outlier), 0.0)
        times = (common + noise).reshape(count, 2)
        # Which of a pair goes first is random: a drift favours neither.
        swapped = self.rng.random(count) < 0.5
        ours = np.where(swapped, times[:, 1], times[:, 0])
        theirs = np.where(swapped, times[:, 0], times[:, 1])
        ours = ours + np.log1p(slowdown) + apart + self.rng.normal(0, self.machine.side)
        return block_ratios(
            np.exp(ours).reshape(blocks, PAIRS).tolist(), np.exp(theirs).reshape(blocks, PAIRS).tolist()
        )

    def apart(self) -> float:
        """What this session, on a GPU of its own, does to the ratio of two different kernels."""
        return float(self.rng.normal(0, np.hypot(self.machine.session, self.machine.unit)))

    def _common(self, count: int) -> Times:
        steps = self.rng.normal(0, self.machine.drift * np.sqrt(1 - 0.95**2), count)
        walk = np.empty(count)
        value = self.rng.normal(0, self.machine.drift) if self.machine.drift else 0.0
        for i, step in enumerate(steps):
            value = 0.95 * value + step
            walk[i] = value
        if self.rng.random() < self.machine.throttled:
            walk[count // 2 :] += np.log1p(self.machine.step)
        return walk + self.rng.normal(0, self.machine.machine)
