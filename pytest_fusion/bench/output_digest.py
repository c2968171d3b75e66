"""What is kept of an output for years: a digest, sampled values and what each may change by, as plain data.

The record needs no torch, so that a baseline is read and compared without it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from pytest_fusion.oracle.lane_result import OutputLanes

# So few that a file stays readable: 32 lie in each row of up to 32 rows of a matrix that small.
SAMPLES = 32
# Two honest kernels are each within some six deviations of the exact value at one element out of 10^8.
_APART = 12.0


@dataclass(frozen=True, slots=True)
class GoldenOutput:
    """One output of one pinned case.

    ``digest`` is of all bytes in logical order. ``values`` are elements spread over the whole output (at positions
    that its size alone decides, complex numbers as two), and ``allowed`` how far each may move between two right
    versions, in the output's own units; empty where nobody could tell. ``magnitude`` is the mean absolute value of the
    finite elements and ``slack`` what that may move by. ``nonfinite`` counts NaN and infinities.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    values: tuple[float, ...] = ()
    allowed: tuple[float, ...] = ()
    magnitude: float = 0.0
    slack: float | None = None
    nonfinite: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "shape": list(self.shape),
            "values": [_strict(value) for value in self.values],
            "allowed": [_strict(value) for value in self.allowed],
            "magnitude": _strict(self.magnitude),
            "slack": None if self.slack is None else _strict(self.slack),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GoldenOutput:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` where the data are not an output."""
        slack = data["slack"]
        return cls(
            name=str(data["name"]),
            dtype=str(data["dtype"]),
            shape=tuple(int(size) for size in data["shape"]),
            digest=str(data["digest"]),
            values=tuple(float(value) for value in data["values"]),
            allowed=tuple(float(value) for value in data["allowed"]),
            magnitude=float(data["magnitude"]),
            slack=None if slack is None else float(slack),
            nonfinite=int(data["nonfinite"]),
        )


def golden_of(name: str, output: Tensor, allowed: Tensor | float | None = None) -> GoldenOutput:
    """The record of ``output``, of any dtype, layout and device.

    ``allowed`` is how far an element may move between two right versions (see :func:`apart`): one number, or a tensor
    of the output's shape. Integers and bools may not move at all; with ``None`` only the digest can tell.
    """
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
        # float32 and narrower need nine digits to be told apart; more would make a diff unreadable.
        values=tuple(_short(value, 9 if own.dtype != torch.float64 and not exact else 17) for value in values.tolist()),
        allowed=tuple(_short(value, 3) for value in moves.tolist()),
        magnitude=_short(size, 9),
        slack=None if slack is None else _short(slack, 3),
        nonfinite=int((~finite).sum()),
    )


def apart(lanes: OutputLanes) -> Tensor | None:
    """How far each element of two right kernels may be apart, float64, of the native shape; ``None`` for integers.

    Twice six granted deviations (``Spread.deviation``), and twice the reference's own error, since a kernel that is no
    worse than the reference passes.
    """
    from pytest_fusion.oracle.rounding import GRIDS
    from pytest_fusion.oracle.tolerance.spread import spread_of

    if lanes.native.dtype not in GRIDS:
        return None
    spread = spread_of(lanes)
    native = (spread.native - spread.centre).abs().nan_to_num(0.0, 0.0, 0.0)
    return (_APART * spread.deviation().single + 2 * native).reshape(lanes.native.shape)


def positions(count: int) -> list[int]:
    """Where an output of ``count`` elements is sampled: its first and last element and evenly between, in order.

    Each is moved by a hash within its share, so that no column of a matrix is left out for its width's sake.
    """
    if count <= SAMPLES:
        return list(range(count))
    share = count / SAMPLES
    inner = {int(share * (i + (i * 0x9E3779B1 % 2**32) / 2**32)) for i in range(1, SAMPLES - 1)}
    return sorted({0, count - 1} | inner)


def _strict(value: float) -> float | str:
    """JSON has no NaN."""
    return value if math.isfinite(value) else str(value)


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
