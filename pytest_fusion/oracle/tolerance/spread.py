"""The spread of the lanes at each element: the exact value, how far honest rounding moves it, and infinities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_result import OutputLanes
from pytest_fusion.oracle.rounding import GRIDS, D, quantum

# Up to here, smoothing the variances leaves each lane out in turn; above, one lane does not move a median.
FEW = 64
SAMPLE = 1 << 14


def nonfinite_class(value: Tensor) -> Tensor:
    """0 finite, 1 +inf, 2 -inf, 3 NaN, as int8."""
    kind = torch.isnan(value).to(torch.int8) * 3
    return torch.where(torch.isinf(value), torch.where(value > 0, 1, 2).to(torch.int8), kind)


@dataclass(slots=True)
class Deviation:
    """Granted standard deviations (N) or (B, N): ``mean`` in averages, ``single`` for the worst element.

    Single elements share more of the usual variance, as the smallest of many uncertain variances has the worst score.
    """

    mean: Tensor
    single: Tensor


@dataclass(slots=True)
class Spread:
    """One output's lanes, flattened for statistics; float64, ``N`` elements, ``K`` lanes.

    ``centre`` (N) is the oracle (or, where that is not finite, the native value). ``rounded`` (K, N) are the lanes as
    an honest kernel would store them, ``squares`` (K, N) their squared errors before that, zero where not finite.
    ``finite`` (K, N) is None when everything is. ``count`` (N): finite lanes. ``rho`` and ``typical`` are the median
    relative and absolute variance of an element; ``moved`` is that of ``OutputLanes``.
    """

    dtype: torch.dtype
    centre: Tensor
    native: Tensor
    rounded: Tensor
    squares: Tensor
    finite: Tensor | None
    count: Tensor | int
    step: Tensor
    rho: Tensor
    typical: Tensor
    moved: bool = False

    @property
    def lanes(self) -> int:
        return int(self.rounded.shape[0])

    def exact(self) -> Tensor | None:
        """Where a result must equal the reference exactly (N): in an output that is ``moved`` and has no rounding."""
        # ``None`` for others: a quotient that happens to be exact, as 41 / 41, is 1 - 2^-24 by a reciprocal. Zeros and
        # subnormal numbers are left out, as they may be flushed.
        same = (self.rounded[0] == self.centre) & (self.native == self.centre)
        if not self.moved or not bool((same | ~torch.isfinite(self.native)).all()):
            return None
        tiny = GRIDS[self.dtype].tiny if self.dtype in GRIDS else torch.finfo(self.dtype).tiny
        return same & (self.centre.abs() >= tiny)

    def deviation(self) -> Deviation:
        """The deviations (N) granted to an honest kernel, including its own rounding to the dtype."""
        variance = self.squares.sum(0) / self._at_least_one(self.count)
        return self._deviation(variance, self.rho, self.typical, self.lanes)

    def deviation_without(self, start: int, stop: int) -> Deviation:
        """The same for lanes ``start..stop``, each judged by all others: (stop - start, N)."""
        rest = self.count - 1 if self.finite is None else self.count - self.finite[start:stop].to(D)
        variance = (self.squares.sum(0) - self.squares[start:stop]) / self._at_least_one(rest)
        few = self.centre.numel() <= FEW
        rho, typical = _typical(variance, self.centre) if few else (self.rho, self.typical)
        return self._deviation(variance, rho, typical, self.lanes - 1)

    @staticmethod
    def _at_least_one(count: Tensor | float) -> Tensor | float:
        return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)

    def _deviation(self, variance: Tensor, rho: Tensor, typical: Tensor, lanes: int) -> Deviation:
        # The variance of few lanes is uncertain, so it shares with the tensor's usual one. No element is granted much
        # more than its own lanes show, or the tails of a GELU would excuse errors at its peaks.
        relative = rho * self.centre.square()
        most = torch.add(2 * self.step.square(), variance, alpha=8)
        common = torch.minimum(relative, most)
        single = torch.minimum(torch.maximum(relative, typical), most)
        if isinstance(self.count, Tensor):
            # No finite lane: the reference overflows where exact arithmetic does not; a kernel that does not is limited
            # to eight times the usual relative error.
            none = self.count == 0
            common, single = (torch.where(none, 128 * relative, value) for value in (common, single))
        return Deviation(self._granted(variance, common, lanes), self._granted(variance, single, lanes))

    def _granted(self, variance: Tensor, common: Tensor, lanes: int) -> Tensor:
        spread = torch.add(variance, common).mul_(0.5)
        rounding = self.step.square() / 12
        if self.centre.numel() < 16:
            # The variance of few lanes and elements is itself uncertain: Student's t instead of the normal.
            spread *= (1 + 6 / lanes) ** 2
        if self.dtype == D:
            # The oracle computes in float64 too, so its own error adds one more lane's.
            return (2 * spread + 2 * rounding).sqrt_().clamp_min_(1e-300)
        return spread.add_(rounding).sqrt_()


def _typical(variance: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Median relative and absolute variance of the non-zero elements: (1), or (B, 1) for (B, N)."""
    usable = centre != 0
    if not bool(usable.any()):
        none = variance.new_zeros((*variance.shape[:-1], 1))
        return none, none
    picked, values = variance[..., usable], centre[usable]
    if picked.shape[-1] > SAMPLE:
        stride = picked.shape[-1] // SAMPLE
        picked, values = picked[..., ::stride], values[::stride]
    relative = (picked / values.square()).nan_to_num(0.0).median(-1, True).values
    return relative, picked.median(-1, True).values


def spread_of(lanes: OutputLanes) -> Spread:
    """The lanes of a floating output, prepared for judging; statistics exclude NaN and infinities."""
    dtype = lanes.native.dtype
    raw = lanes.lanes.reshape(lanes.lanes.shape[0], -1)
    oracle = lanes.oracle.reshape(-1)
    native = lanes.native.to(D).reshape(-1)
    rounded = raw.to(dtype).to(D) if dtype != D else raw
    finite: Tensor | None = None
    count: Tensor | int = raw.shape[0]
    # A sum is finite if every term is, except for overflow: one pass instead of three.
    if not bool(torch.isfinite(rounded.sum() + oracle.sum() + native.sum())):
        usable = torch.isfinite(raw)
        mean = torch.where(usable, raw, 0.0).sum(0) / usable.sum(0).clamp_min(1)
        centre = torch.where(torch.isfinite(oracle), oracle, torch.where(torch.isfinite(native), native, mean))
        finite = torch.isfinite(rounded)
        raw = torch.where(usable, raw, centre)
        oracle = centre
        count = finite.sum(0).to(D)
        squares = torch.where(finite, (raw - centre).square(), 0.0)
    else:
        squares = (raw - oracle).square()
    step = quantum(oracle, dtype)
    total = squares.sum(0) / Spread._at_least_one(count)
    typical = _typical(total, oracle)
    return Spread(dtype, oracle, native, rounded, squares, finite, count, step, *typical, moved=lanes.moved)


def allowed_classes(candidate: Tensor, lanes: OutputLanes, spread: Spread) -> Tensor:
    """Whether (N) the candidate is finite, infinite or NaN as the oracle, the native result or some lane is.

    Within four deviations of overflow, both sides of it are allowed.
    """
    got = nonfinite_class(candidate)
    oracle = lanes.oracle.reshape(-1)
    allowed = (got == nonfinite_class(oracle.to(spread.dtype))) | (got == nonfinite_class(spread.native))
    if bool(allowed.all()):
        return allowed
    allowed |= (nonfinite_class(spread.rounded) == got).any(0)
    largest = GRIDS[spread.dtype].largest
    slack = 4 * spread.deviation().single
    over = torch.where(oracle > 0, 1, 2).to(torch.int8)
    near_above = (oracle.abs() + slack >= largest) & (got == over)
    near_below = (oracle.abs() - slack <= largest) & (got == 0) & torch.isfinite(oracle)
    # Of two infinities that cancel to NaN in the reference, a kernel may reach one alone and keep the other's digits.
    either = torch.isnan(spread.native) & ~torch.isnan(oracle) & torch.isinf(candidate)
    return allowed | near_above | near_below | either
