"""The lasting record of an output: a digest, samples and their allowed changes. Comparing records needs no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pytest_fusion.bench.baseline.bootstrap import short
from pytest_fusion.bench.baseline.row import GoldenOutput

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_fusion.oracle.lane_result import OutputLanes

# So few that a file stays readable: a matrix of up to 32 rows has one of the 32 in each row.
SAMPLES = 32
# Two right kernels are each within some six deviations of the exact value at one element out of 10^8.
_APART = 12.0


def golden_of(name: str, output: Tensor, allowed: Tensor | float | None = None) -> GoldenOutput:
    """The record of ``output``. An element may move by ``allowed``, a number or a tensor of its shape (see
    :func:`apart`), between right versions; integers and bools may not. With ``None`` only the digest decides."""
    import torch

    from pytest_fusion.run.bits import as_bytes

    with torch.no_grad():
        own = output.detach().resolve_conj().resolve_neg().cpu()
        digest = hashlib.sha256(as_bytes(own).numpy().data).hexdigest()
        exact = not (own.is_floating_point() or own.is_complex())
        seen = torch.view_as_real(own) if own.is_complex() else own
        flat = seen.reshape(-1).to(torch.float64)
        at = torch.tensor(positions(flat.numel()), dtype=torch.int64)
        finite = torch.isfinite(flat)
        limits = torch.zeros(()) if exact else allowed
        values, moves, slack = flat[at], torch.empty(0), None
        if limits is not None:
            limits = torch.as_tensor(limits, dtype=torch.float64).detach().cpu()
            limits = limits.unsqueeze(-1) if own.is_complex() and limits.dim() else limits
            spread = limits.expand(seen.shape).reshape(-1)
            moves = spread[at]
            slack = float(spread[finite].mean()) if bool(finite.any()) else 0.0
        size = float(flat[finite].abs().mean()) if bool(finite.any()) else 0.0
    return GoldenOutput(
        name=name,
        dtype=str(output.dtype).removeprefix("torch."),
        shape=tuple(output.shape),
        digest=f"sha256:{digest}",
        # float32 and narrower need nine digits to be distinct; more would make a diff unreadable.
        values=tuple(short(value, 9 if own.dtype != torch.float64 and not exact else 17) for value in values.tolist()),
        allowed=tuple(short(value, 3) for value in moves.tolist()),
        magnitude=short(size, 9),
        slack=None if slack is None else short(slack, 3),
        nonfinite=int((~finite).sum()),
    )


def apart(lanes: OutputLanes) -> Tensor | None:
    """The allowed distance of two right kernels by element, float64; ``None`` for integers. It is twice six deviations
    (``Spread.deviation``), and twice the reference's own error, which a passing kernel may have too."""
    from pytest_fusion.oracle.rounding import GRIDS
    from pytest_fusion.oracle.tolerance.spread import spread_of

    if lanes.native.dtype not in GRIDS:
        return None
    spread = spread_of(lanes)
    native = (spread.native - spread.centre).abs().nan_to_num(0.0, 0.0, 0.0)
    return (_APART * spread.deviation().single + 2 * native).reshape(lanes.native.shape)


def positions(count: int) -> list[int]:
    """Sample positions: first, last, and evenly between, moved by a hash so that no column of a matrix is missed."""
    if count <= SAMPLES:
        return list(range(count))
    share = count / SAMPLES
    inner = {int(share * (i + (i * 0x9E3779B1 % 2**32) / 2**32)) for i in range(1, SAMPLES - 1)}
    return sorted({0, count - 1} | inner)


GoldenStatus = Literal["same", "within", "changed", "unknown"]


@dataclass(frozen=True, slots=True)
class GoldenChange:
    """One output: bitwise ``same``, ``within`` tolerance (a drift), ``changed`` beyond it, or ``unknown``."""

    name: str
    verdict: GoldenStatus
    reason: str = ""


def compare_golden(before: Sequence[GoldenOutput], now: Sequence[GoldenOutput]) -> list[GoldenChange]:
    """All outputs of both sides, in the order of the baseline."""
    old, new = ({output.name: output for output in outputs} for outputs in (before, now))
    found = []
    verdict: GoldenStatus
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in old:
            verdict, reason = "unknown", "the baseline does not have it; add it with --fusion-update new"
        elif name not in new:
            verdict, reason = "unknown", "this run has none of it; accept that with --fusion-update all"
        else:
            verdict, reason = _compare(old[name], new[name])
        found.append(GoldenChange(name, verdict, reason))
    return found


def _compare(before: GoldenOutput, now: GoldenOutput) -> tuple[GoldenStatus, str]:
    for what in ("dtype", "shape"):
        was, is_ = getattr(before, what), getattr(now, what)
        if was != is_:
            return "changed", f"its {what} was {was} and is {is_}"
    if before.digest == now.digest:
        return "same", "bitwise"
    if not before.allowed or len(before.values) != len(now.values):
        return "unknown", "its bits differ, and the baseline does not say by how much they may"
    if before.nonfinite != now.nonfinite:
        return "changed", f"it had {before.nonfinite} NaN or infinite elements and has {now.nonfinite}"
    # A new kernel that rounds more is judged by its own rounding too.
    either = [max(pair) for pair in zip(before.allowed, now.allowed or before.allowed, strict=True)]
    worst, at = max(
        (_excess(was, is_, may), i)
        for i, (was, is_, may) in enumerate(zip(before.values, now.values, either, strict=True))
    )
    if worst > 1:
        values = f"sample {at} was {before.values[at]:.9g} and is {now.values[at]:.9g}"
        return "changed", f"{values}, where {either[at]:.3g} is allowed"
    slack = max(before.slack or 0.0, now.slack or 0.0)
    moved = abs(before.magnitude - now.magnitude)
    if moved > slack:
        magnitudes = f"the mean magnitude was {before.magnitude:.9g} and is {now.magnitude:.9g}"
        return "changed", f"{magnitudes}, where {slack:.3g} is allowed"
    if worst == 0 and moved == 0 and not any(either):
        return "changed", "its bits differ, and not one may"
    return "within", f"a drift: its bits differ, by {worst:.2f} of what is allowed at most"


def _excess(was: float, is_: float, allowed: float) -> float:
    if was == is_ or (math.isnan(was) and math.isnan(is_)):
        return 0.0
    if not (math.isfinite(was) and math.isfinite(is_)):
        return math.inf
    return abs(was - is_) / allowed if allowed > 0 else math.inf
