"""Runs every rule on every kernel of many random problems and counts what it says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.tolerance.problems import FAMILIES, Draw, Problem
from benchmarks.tolerance.rules import RULES
from pytest_fusion.oracle import OutputLanes, run_lanes
from pytest_fusion.oracle.eager import run_eager
from pytest_fusion.oracle.tolerance import judge_output

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WRONG, NOTICED, STRICT = "wrong", "wrong or hazard", "fp32 inside"
COLUMNS = (WRONG, NOTICED, STRICT, *RULES)
Outcome = tuple[str, str, str, str]  # family, dtype, "right" | "eager" | "wrong" | "harmless", kernel


@dataclass(slots=True)
class Score:
    """``refused[outcome, rule]`` and ``seen[outcome]`` count kernels; ``alarms`` names what ours refused wrongly."""

    refused: Counter[tuple[Outcome, str]] = field(default_factory=Counter)
    seen: Counter[Outcome] = field(default_factory=Counter)
    alarms: list[str] = field(default_factory=list)

    def rate(self, rule: str, keep: Callable[[Outcome], bool]) -> tuple[float, int]:
        """Share refused by ``rule`` among the kernels that ``keep`` selects, and their number."""
        total = sum(n for outcome, n in self.seen.items() if keep(outcome))
        refused = sum(n for (outcome, name), n in self.refused.items() if name == rule and keep(outcome))
        return (refused / total if total else math.nan), total


def run(trials: int, seed: int) -> Score:
    """``trials`` problems of every family and dtype."""
    score = Score()
    for number, (family, make) in enumerate(FAMILIES.items()):
        for kind, dtype in enumerate(DTYPES):
            for trial in range(trials):
                own = ((seed * 1009 + number) * 7 + kind) * 100_003 + trial
                _count(score, family, dtype, make(Draw.seeded(own, dtype)), own)
    return score


def _count(score: Score, family: str, dtype: torch.dtype, problem: Problem, seed: int) -> None:
    few = _lanes(problem, 6, "E", seed)
    strict = _lanes(problem, 6, "F", seed + 1)
    fresh: dict[str, OutputLanes] = {}

    def more(kind: str, offset: int) -> Callable[[], OutputLanes]:
        def lanes() -> OutputLanes:
            if kind not in fresh:
                count = 24 if few.native.numel() >= 16 else 64
                fresh[kind] = _lanes(problem, count, kind, seed + offset)
            return fresh[kind]

        return lanes

    def eager() -> Tensor | None:
        return run_eager(lambda: [problem.reference(*problem.inputs)], seed=seed)[0] if dtype.itemsize == 2 else None

    observable = _observable(problem, few)
    sides = {"right": problem.right, "eager": problem.eager, "wrong": problem.wrong}
    kernels = [(side, name, value) for side, found in sides.items() for name, value in found.items()]
    for side, name, value in kernels:
        if side == "wrong" and not observable(value):
            side = "harmless"
        outcome = (family, str(dtype)[6:], side, name)
        score.seen[outcome] += 1
        wide = more("F", 7921) if dtype.itemsize == 2 else None
        verdict = judge_output(value, few, more("E", 7919), wide=wide, eager=eager)
        accepted = {WRONG: verdict.grade != "D", NOTICED: verdict.ok}
        accepted[STRICT] = judge_output(value, strict, more("F", 7920)).ok
        accepted |= {rule: accept(value, few.native, few.oracle) for rule, accept in RULES.items()}
        for rule, ok in accepted.items():
            score.refused[outcome, rule] += not ok
        if (side == "right" and not verdict.ok) or (side == "eager" and verdict.grade == "D"):
            shape = tuple(problem.inputs[0].shape)
            score.alarms.append(
                f"{family} {outcome[1]} {name} {shape}: {verdict.statistic} {verdict.ratio:.2f}, {verdict.grade}"
            )


def _lanes(problem: Problem, count: int, kind: str, seed: int) -> OutputLanes:
    kind_name = "E" if kind == "E" else "F"
    run_ = run_lanes(lambda: [problem.reference(*problem.inputs)], lanes=count, kind=kind_name, seed=seed)  # type: ignore[arg-type]
    return run_.outputs[0]


def _observable(problem: Problem, lanes: OutputLanes) -> Callable[[Tensor], bool]:
    """Whether a wrong result differs measurably from right ones: a definition that no rule takes part in.

    Its rms or relative rms error is over 1.5 times that of the worst right kernel, or (below float32) twice as many
    elements differ from the exact result's rounding, or its non-finite elements are others than the reference's.
    """
    exact, native = lanes.oracle, lanes.native
    finite = torch.isfinite(exact)
    scale = float(exact[finite].square().mean().sqrt()) if bool(finite.any()) else 0.0
    target = exact.to(native.dtype)

    def distances(value: Tensor) -> tuple[float, float]:
        error = (value.double() - exact)[finite]
        if not bool(torch.isfinite(error).all()):
            return math.inf, math.inf
        if not error.numel():
            return 0.0, 0.0
        relative = error / (exact[finite].abs() + 1e-3 * scale + 1e-30)
        return float(error.square().mean().sqrt()), float(relative.square().mean().sqrt())

    right = [distances(value) for value in problem.right.values()]
    rms, relative_rms = max(a for a, _ in right), max(b for _, b in right)
    moved = max(float((value != target).double().mean()) for value in problem.right.values())

    def observable(value: Tensor) -> bool:
        a, b = distances(value)
        if a > 1.5 * rms or b > 1.5 * relative_rms:
            return True
        if not torch.equal(torch.isfinite(value), torch.isfinite(native)):
            return True
        share = float((value != target).double().mean())
        return native.dtype != torch.float32 and share > 2 * moved + 0.005 + 1.5 / value.numel()

    return observable
