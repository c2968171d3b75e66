"""How often a rule calls a slowdown that is there, and one that is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from benchmarks.judging.machines import Machine, Session
from pytest_fusion.bench.baseline.bootstrap import Estimate, estimate
from pytest_fusion.bench.baseline.latency_judge import (
    Judgement,
    Level,
    Noise,
    Question,
    against_stored,
    judge,
    level,
    noise,
)
from pytest_fusion.bench.baseline.row import Latency
from pytest_fusion.bench.baseline.row import Session as Stored

# A run has this many cases, and the one that became slower must be found among them.
CASES = 30
Rule = Callable[[Machine, float, int, np.random.Generator], Judgement]


def beside(found: Estimate, machine: Noise) -> Question:
    """Whether a kernel is slower than another one that was measured beside it: 1 % counts, and nothing is stored."""
    return against_stored(found, Level(0.0, 0.0, 0.0, known=True), machine, smallest=0.01)


def incumbent(machine: Machine, slowdown: float, seed: int, rng: np.random.Generator) -> Judgement:
    """The kernel beside the one of before, in one session."""
    session = Session(machine, rng)
    found = estimate(session.ratios(slowdown), seed=seed)
    return judge([beside(found, _noise(session, seed))], family=CASES)[0]


def stored(sessions: int, *, same_unit: bool = True) -> Rule:
    """The kernel beside its reference, after as many ``sessions``, on the same GPU or each on another."""

    def rule(machine: Machine, slowdown: float, seed: int, rng: np.random.Generator) -> Judgement:
        visits = [Session(machine, rng) for _ in range(sessions + 1)]
        own = visits[0].rng.normal(0, machine.unit)
        aparts = [own + float(rng.normal(0, machine.session)) if same_unit else visit.apart() for visit in visits]
        *before, now = [
            estimate(visit.ratios(slowdown if visit is visits[-1] else 0.0, apart), seed=seed)
            for visit, apart in zip(visits, aparts, strict=True)
        ]
        units = ["one"] * (sessions + 1) if same_unit else [str(i) for i in range(sessions + 1)]
        history = tuple(Stored(one.ratio, unit) for one, unit in zip(before[:-1], units, strict=False))
        kept = _latency(before[-1], units[sessions - 1], history)
        machine_noise = _noise(visits[-1], seed)
        question = against_stored(now, level(kept, units[-1], machine_noise.spread), machine_noise)
        return judge([question], family=CASES)[0]

    return rule


def rates(rule: Rule, machine: Machine, slowdown: float, runs: int, seed: int) -> dict[str, float]:
    """The share of each verdict over ``runs`` simulated runs."""
    rng = np.random.default_rng([seed, round(1e6 * slowdown)])
    found = Counter(rule(machine, slowdown, index, rng).verdict for index in range(runs))
    return {verdict: count / runs for verdict, count in found.items()}


def _noise(session: Session, seed: int) -> Noise:
    return noise([estimate(session.ratios(), seed=seed)])


def _latency(found: Estimate, unit: str, history: tuple[Stored, ...]) -> Latency:
    return Latency(
        1e-5, 2e-5, found.ratio, found.low, found.high, found.error, found.blocks, unit=unit, history=history
    )
