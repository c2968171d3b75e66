"""Pointwise chains and seeded dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import near_one, normal
from benchmarks.suite.model import Bar, Problem, Row, Work, bars, moved, over
from reference_kernels.pointwise import add_mul_act, dropout, relu_scale_bias

SIZES = {"rows": 8192, "n": 8192}
SMALL = {"rows": 33, "n": 100}
_P = 0.1


def _relu_scale_bias(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * scale + bias


def chain(device: torch.device, rows: int, n: int) -> Problem:
    x, scale, bias = normal(device, rows, n), near_one(device, n), normal(device, n)
    return Problem(
        {"x": x, "scale": scale, "bias": bias},
        relu_scale_bias,
        _relu_scale_bias,
        Work(2 * moved(x)),
        backward=Work(3 * moved(x)),
        grads=("x", "scale", "bias"),
    )


def _add_mul_silu(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return F.silu((x + y) * z)


def gated_sum(device: torch.device, rows: int, n: int) -> Problem:
    x, y, z = (normal(device, rows, n) for _ in range(3))
    return Problem(
        {"x": x, "y": y, "z": z},
        lambda x, y, z: add_mul_act(x, y, z, "silu"),
        _add_mul_silu,
        Work(4 * moved(x)),
        backward=Work(6 * moved(x)),
        grads=("x", "y", "z"),
    )


def _dropped(inputs: Mapping[str, Any], y: torch.Tensor) -> str:
    """Which elements are dropped is each way's own: what is left must be scaled, and be as many as asked for."""
    x = inputs["x"].reshape(-1)[: 1 << 20].float()
    found = y.reshape(-1)[: 1 << 20].float()
    kept = found != 0
    share = float(kept.float().mean())
    if abs(share - (1 - _P)) > 0.1:
        return f"it keeps {share:.1%} instead of {1 - _P:.1%}"
    away = float((found[kept] * (1 - _P) - x[kept]).norm() / x[kept].norm())
    return f"what it keeps is {away:.3g} away" if away > 0.01 else ""


def seeded(device: torch.device, rows: int, n: int) -> Problem:
    x = normal(device, rows, n)
    return Problem(
        {"x": x},
        lambda x: dropout(x, 20261122, _P),
        lambda x: F.dropout(x, _P, training=True),
        Work(2 * moved(x)),
        backward=Work(2 * moved(x)),
        grads=("x",),
        agrees=_dropped,
    )


_FAST = bars(Bar("copy", 0.92), over(compile=0.97))

ROWS = [
    Row(
        "pointwise",
        "relu(x) * scale + bias, 8192x8192",
        chain,
        SIZES,
        SMALL,
        bars(_FAST, Bar("us", 68), over(eager=2.6)),
        backward=True,
    ),
    Row("pointwise", "silu((x + y) * z), 8192x8192", gated_sum, SIZES, SMALL, _FAST, backward=True),
    Row(
        "pointwise",
        "dropout 0.1, 8192x8192",
        seeded,
        SIZES,
        SMALL,
        bars(over(eager=1.15), over("backward", eager=1.15)),
        backward=True,
    ),
]
