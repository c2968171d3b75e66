"""Check `vacuity`: a test in which a wrong answer would pass everywhere proves nothing and fails."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_fusion.checks.verdict import Verdict, failed, hazard, passed, unknown
from pytest_fusion.oracle.rounding import significand
from pytest_fusion.run import pristine

# Significand bits with the hidden one, of the next lower precision: bfloat16's for float32 and float16 (11 bits are
# TF32's too, which a tolerance may allow), float8_e4m3's for bfloat16, float32's for float64.
_LOWER_BITS = {torch.float64: 24, torch.float32: 8, torch.float16: 8, torch.bfloat16: 4}
# Fewer judged cases do not show what a run would let through.
ENOUGH_CASES = 5

_MEANING = {
    "zeros": "an output of zeros",
    "constant": "a constant output",
    "previous": "the previous case's output, left in memory,",
    "lower-precision": "an output rounded to the next lower precision",
}
_COARSE = "lower-precision"


class Vacuity:
    """Records, over all cases, which wrong answers some case refuted."""

    def __init__(self) -> None:
        self._open: dict[str, set[str]] = {}
        self._tried: dict[str, dict[str, int]] = {}
        self._previous: dict[str, torch.Tensor] = {}

    def observe(self, name: str, right: torch.Tensor, accepts: Callable[[torch.Tensor], bool]) -> None:
        """Try the wrong answers that no case has refuted. ``accepts`` is the case's own judge of this output."""
        pending = self._open.setdefault(name, set(_MEANING))
        tried = self._tried.setdefault(name, {})
        for kind in sorted(pending):
            wrong = self._wrong(kind, name, right)
            if wrong is None:
                continue
            tried[kind] = tried.get(kind, 0) + 1
            if not accepts(wrong):
                pending.discard(kind)
        if "previous" in pending and right.numel():
            self._previous[name] = right.detach().reshape(-1)[:4096].clone()
        elif "previous" not in pending:
            self._previous.pop(name, None)

    def _wrong(self, kind: str, name: str, right: torch.Tensor) -> torch.Tensor | None:
        """A wrong answer of this kind; ``None`` where the case cannot distinguish it from the right one."""
        if right.numel() == 0:
            return None
        if kind == "zeros":
            return torch.zeros_like(right)
        if kind == "constant":
            if right.numel() < 2:
                return None
            return torch.full_like(right, right.reshape(-1)[right.numel() // 2].item())
        if kind == "previous":
            last = self._previous.get(name)
            if last is None or last.dtype != right.dtype:
                return None
            return last.repeat(-(-right.numel() // last.numel()))[: right.numel()].reshape(right.shape)
        bits = _LOWER_BITS.get(right.dtype)
        if bits is None:
            return None
        wrong = significand(right, bits)
        # Masks and small integers are exact in any precision: rounded, they are not wrong.
        return None if pristine.equal(wrong.nan_to_num(), right.nan_to_num()) else wrong

    def conclude(self, judged: int, *, fixed: bool = False) -> Verdict:
        """The verdict over the whole run; ``fixed``: by a fixed tolerance."""
        # A fixed tolerance that accepts the next lower precision is a hazard. The automatic one does so only where the
        # reference is that coarse inside, which is noted.
        if judged < ENOUGH_CASES:
            return unknown("vacuity", f"only {judged} case(s) were judged; {ENOUGH_CASES} are needed for a verdict")
        if not self._open:
            return unknown("vacuity", "no case had an output tensor that is compared element by element")
        passing = [
            (kind == _COARSE, name, kind, cases)
            for name, pending in self._open.items()
            for kind in pending
            if (cases := self._tried[name].get(kind, 0)) >= ENOUGH_CASES and (fixed or kind != _COARSE)
        ]
        if not passing:
            coarse = [name for name, pending in sorted(self._open.items()) if _COARSE in pending & {*self._tried[name]}]
            return passed("vacuity", outputs=sorted(self._open), coarse=coarse)
        loose, name, kind, cases = min(passing)
        would = f"{_MEANING[kind]} would have passed as {name} in all {cases} cases that could show it"
        if loose:
            reason = f"{would}; tighten rtol and atol, or leave tolerance= away, which needs no numbers"
            return hazard("vacuity", "loose-tolerance", reason, output=name, wrong=kind, cases=cases)
        return failed(
            "vacuity",
            f"{would}, so this test proves nothing about it; widen values=, dims= or tighten the tolerance, or, "
            "where it only makes up for rounding, say allow={'vacuous-test': 'why'}",
            identity=f"vacuity:{name}:{kind}",
            output=name,
            wrong=kind,
            cases=cases,
        )
