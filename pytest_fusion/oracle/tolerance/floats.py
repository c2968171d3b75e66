"""The judge of floating-point outputs, which compares a kernel with honest rounding of the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.oracle.lane_result import OutputLanes
from pytest_fusion.oracle.rounding import U32, D
from pytest_fusion.oracle.tolerance.output_verdict import ValuesVerdict, index_of
from pytest_fusion.oracle.tolerance.spread import Deviation, Spread, allowed_classes, spread_of
from pytest_fusion.run import pristine

# Below this many elements an average shows no more than the worst element.
ENOUGH = 16
# From here on the share of elements at another neighbour is counted.
MANY = 64


def statistics_of(
    error: Tensor, deviation: Deviation, spread: Spread, shape: tuple[int, ...], used: Tensor | None = None
) -> dict[str, Tensor]:
    """Statistics of absolute errors (B, N), each (B); ``used`` (B or 1, N) masks elements.

    In units of the granted deviation: ``max``, ``rms``, and the rms of the worst ``row``, where the shape has enough.
    ``moved``, for 16-bit outputs, is the share of elements that no rounding of the exact value, plus or minus six
    deviations of the arithmetic before it, gives.
    """
    if used is not None:
        error = torch.where(used, error, 0.0)
    count = error.shape[-1] if used is None else used.sum(-1).clamp_min(1)
    square = (error / deviation.mean).square_()
    found = {"max": (error / deviation.single).abs_().amax(-1), "rms": (square.sum(-1) / count).sqrt()}
    if len(shape) > 1 and 8 <= shape[-1] < error.shape[-1]:
        found["row"] = _worst_row(square, shape, used)
    if spread.dtype.itemsize == 2 and error.shape[-1] >= MANY:
        half = spread.step / 2
        before = (deviation.mean.square() - half.square() / 3).clamp_min(0) + (4 * U32 * spread.centre).square()
        found["moved"] = (error.abs() - half > 6 * before.sqrt()).to(error.dtype).sum(-1) / count
    return found


def _worst_row(square: Tensor, shape: tuple[int, ...], used: Tensor | None) -> Tensor:
    table = square.reshape(square.shape[0], -1, shape[-1])
    if used is None:
        return table.mean(-1).sqrt().amax(-1)
    # At least half of the row's length: few usable elements make no average.
    count = used.reshape(-1, *table.shape[1:]).sum(-1).clamp_min(shape[-1] // 2)
    return (table.sum(-1) / count).sqrt().amax(-1)


# The most lane values judged at a time, which bounds memory; groups of a CPU stay in its cache (2^17 values are 1 MiB:
# 342 ms instead of 561 for 2^20 elements and six lanes).
CHUNK = 1 << 22
CACHED = 1 << 17
# A failure by more than this factor is not due to the values drawn.
GROSS = 4.0
WORDS = {
    "max": "single elements are further off than rounding explains",
    "rms": "the error over all elements is larger than rounding explains",
    "row": "one row is further off than rounding explains",
    "moved": "more elements went to another neighbour than rounding the exact value explains",
}


def judge_floats(candidate: Tensor, lanes: OutputLanes, *, inclusive: bool = True) -> ValuesVerdict:
    """The verdict on a floating candidate of the native shape and dtype (fp16, bf16, fp32 or fp64).

    ``inclusive`` raises every limit to 1.1 times what the native reference scores; grade A is judged without it.
    """
    shape = tuple(candidate.shape)
    got = candidate.detach().to(D).reshape(-1)
    if pristine.equal(got, lanes.oracle.reshape(-1)) and bool(torch.isfinite(got.sum())):
        # As of a copy or a ReLU.
        reason = "no error: the exact values"
        return ValuesVerdict(True, None, "max", 0.0, **_at(0, got, got, shape), total=got.numel(), reason=reason)
    spread = spread_of(lanes)
    fine = allowed_classes(got, lanes, spread)
    if not bool(fine.all()):
        return _nonfinite(got, spread, fine, shape)
    used: Tensor | None = None
    if spread.finite is not None or not bool(torch.isfinite(got.sum())):
        used = torch.isfinite(got) & torch.isfinite(spread.centre)
        if not bool(used.any()):
            return ValuesVerdict(True, None, "max", 0.0, total=candidate.numel(), reason="nothing is finite")
    exact = spread.exact()
    if exact is not None and bool((wrong := exact & (got != spread.centre)).any()):
        return _inexact(got, spread, wrong, shape)
    deviation = spread.deviation()
    limits, native = _limits(spread, deviation, shape, inclusive)
    error = got - spread.centre if used is None else torch.where(used, got - spread.centre, 0.0)
    if inclusive:
        error = _excused(error, got, spread, deviation, limits, native)
    averaged = used
    if used is not None and isinstance(spread.count, Tensor):
        # Where no lane is finite, the averages of honest kernels are unknown; single elements are judged.
        averaged = used & (spread.count > 0)
    measured = statistics_of(error[None], deviation, spread, shape, averaged)
    measured["max"] = (error / deviation.single).abs().amax(-1, True)
    return _verdict(measured, limits, error, got, spread, deviation, shape)


def _nulls(spread: Spread, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The statistics (K) of each lane, stored as a kernel stores it and judged by the other lanes."""
    most = CHUNK if spread.centre.is_cuda else min(CHUNK, CACHED)
    group = max(1, most // max(1, spread.centre.numel()))
    parts: list[dict[str, Tensor]] = []
    for start in range(0, spread.lanes, group):
        stop = min(start + group, spread.lanes)
        used = None if spread.finite is None else spread.finite[start:stop] & torch.isfinite(spread.centre)
        error = spread.rounded[start:stop] - spread.centre
        parts.append(statistics_of(error, spread.deviation_without(start, stop), spread, shape, used))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _limits(
    spread: Spread, deviation: Deviation, shape: tuple[int, ...], inclusive: bool
) -> tuple[dict[str, float], Tensor | None]:
    """Limits from the lanes' own statistics, raised to the native reference's; and the native errors (N)."""
    null = _nulls(spread, shape)
    count = spread.centre.numel()
    columns = shape[-1] if shape else 1
    factor = {"max": (2.0, 0.0, 4.0), "rms": (1.2, 2 / math.sqrt(count), 0.0)}
    factor["row"] = (1.5, 2 / math.sqrt(max(columns, 1)), 0.0)
    # The lanes cover arithmetic before the last rounding; 3 in 1000 elements are spare.
    factor["moved"] = (2.0, 0.003 + 3 / count, 0.0)
    limits: dict[str, float] = {}
    for name, values in null.items():
        if name == "rms" and count < ENOUGH:
            continue
        times, plus, floor = factor[name]
        worst, mean = float(values.max()), float(values.mean())
        limits[name] = max(times * worst + plus, mean + 5 * float(values.std()), floor)
    if not inclusive:
        return limits, None
    finite = torch.isfinite(spread.native) & torch.isfinite(spread.centre)
    native = torch.where(finite, spread.native - spread.centre, 0.0)
    # Where the reference itself goes astray (an overflow on the way), only there a kernel may follow it.
    astray = native.abs() > 3 * limits["max"] * deviation.single
    own = statistics_of(native[None], deviation, spread, shape, (finite & ~astray)[None])
    for name, value in own.items():
        if name in limits:
            limits[name] = max(limits[name], 1.1 * float(value))
    return limits, native


def _excused(
    error: Tensor, got: Tensor, spread: Spread, deviation: Deviation, limits: dict[str, float], native: Tensor | None
) -> Tensor:
    """Errors, set to zero where the kernel equals an astray reference to within that one's rounding."""
    if native is None:
        return error
    astray = native.abs() > limits["max"] * deviation.single
    if not bool(astray.any()):
        return error
    near = (got - spread.native).abs() <= 4 * deviation.single.minimum(spread.native.abs() * 2.0**-6 + spread.step)
    return torch.where(astray & near, 0.0, error)


def _verdict(
    measured: dict[str, Tensor],
    limits: dict[str, float],
    error: Tensor,
    got: Tensor,
    spread: Spread,
    deviation: Deviation,
    shape: tuple[int, ...],
) -> ValuesVerdict:
    ratios = {name: float(value) / limits[name] for name, value in measured.items() if name in limits}
    # The first failing statistic in this order is the most specific.
    failing = [name for name in ("max", "row", "rms", "moved") if ratios.get(name, 0.0) > 1]
    name = failing[0] if failing else max(ratios, key=ratios.__getitem__)
    worst = int((error.abs() / deviation.single).argmax())
    allowed = limits["max"] * deviation.single
    at = _at(worst, got, spread.centre, shape)
    found = ValuesVerdict(
        True,
        None,
        name,
        ratios[name],
        **at,
        allowed=float(allowed[worst]),
        mismatched=int((error.abs() > allowed).sum()),
        total=got.numel(),
        reason="within rounding",
    )
    if not failing:
        return found
    if name == "row":
        row = int((error / deviation.mean).square().reshape(-1, shape[-1]).sum(-1).argmax())
    which = f"row {list(index_of(row, shape[:-1]))}" if name == "row" else name
    reason = (
        f"{WORDS[name]}: {which} is {ratios[name]:.3g} times the allowed; worst element {list(at['index'])} is "
        f"{at['got']:.9g}, exact {at['expected']:.9g}, off by {float(error[worst].abs()):.3g} where "
        f"{float(allowed[worst]):.3g} is allowed"
    )
    return replace(found, ok=False, grade="D", statistical=ratios["max"] <= GROSS, reason=reason)


def _at(worst: int, got: Tensor, expected: Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
    """The verdict's fields of the element that it shows."""
    return {"index": index_of(worst, shape), "got": float(got[worst]), "expected": float(expected[worst])}


def _inexact(got: Tensor, spread: Spread, wrong: Tensor, shape: tuple[int, ...]) -> ValuesVerdict:
    # Less than half of the distance to the next number is no error; any other number is further off.
    halves = torch.where(wrong, 2 * (got - spread.centre) / spread.step, 0.0).abs()
    worst = int(halves.argmax())
    at, count = _at(worst, got, spread.centre, shape), int(wrong.sum())
    reason = (
        f"{count} of {got.numel()} elements differ from the reference, which is exact here, so no error is allowed; "
        f"worst element {list(at['index'])} is {at['got']:.9g}, exact {at['expected']:.9g}"
    )
    ratio, allowed = float(halves[worst]), float(spread.step[worst]) / 2
    return ValuesVerdict(
        False, "D", "exact", ratio, **at, allowed=allowed, mismatched=count, total=got.numel(), reason=reason
    )


def _nonfinite(got: Tensor, spread: Spread, fine: Tensor, shape: tuple[int, ...]) -> ValuesVerdict:
    wrong = ~fine
    count = int(wrong.sum())
    at = _at(int(wrong.to(torch.int8).argmax()), got, spread.native, shape)
    reason = (
        f"{count} of {got.numel()} elements are finite where the reference is not or the other way round; "
        f"first at {list(at['index'])}: got {at['got']:.9g}, the reference has {at['expected']:.9g} and "
        "neither exact nor randomly rounded arithmetic allows it"
    )
    return ValuesVerdict(False, "D", "nonfinite", math.inf, **at, mismatched=count, total=got.numel(), reason=reason)


def excess_floats(candidate: Tensor, lanes: OutputLanes) -> Tensor:
    """float64, of the candidate's shape: error over what rounding explains; infinite for NaN or infinity misplaced."""
    got = candidate.detach().to(D).reshape(-1)
    spread = spread_of(lanes)
    wrong = ~allowed_classes(got, lanes, spread)
    deviation = spread.deviation()
    limits, native = _limits(spread, deviation, tuple(candidate.shape), True)
    used = torch.isfinite(got) & torch.isfinite(spread.centre)
    error = torch.where(used, got - spread.centre, 0.0)
    error = _excused(error, got, spread, deviation, limits, native)
    share = torch.where(error == 0, 0.0, error.abs() / (limits["max"] * deviation.single))
    if (exact := spread.exact()) is not None:
        wrong |= exact & (error != 0)
    return torch.where(wrong, math.inf, share).reshape(candidate.shape)
