"""Softmax: plain rows of many widths, scale and mask, causal attention scores with dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import liger, normal
from benchmarks.suite.model import LIGER, Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.softmax import softmax

_SCALE, _P = 0.125, 0.1
_ELEMENTS = 1 << 27


def plain(device: torch.device, rows: int, n: int, compiled: bool = True) -> Problem:
    x = normal(device, rows, n)
    return Problem(
        {"x": x},
        softmax,
        lambda x: torch.softmax(x, -1),
        Work(2 * moved(x)),
        {LIGER: Way(liger("softmax", "LigerSoftmaxFunction"))},
        backward=Work(3 * moved(x)),
        grads=("x",),
        compiles="eager" if compiled else None,
    )


def masked(device: torch.device, rows: int, n: int) -> Problem:
    x, keep = normal(device, rows, n), torch.rand(rows, n, device=device, dtype=torch.float16) < 0.7
    return Problem(
        {"x": x, "keep": keep},
        lambda x, keep: softmax(x, _SCALE, keep),
        lambda x, keep: torch.softmax((x * _SCALE).masked_fill(~keep, float("-inf")), -1),
        Work(2 * moved(x) + moved(keep)),
        backward=Work(3 * moved(x) + moved(keep)),
        grads=("x",),
    )


def _causal(x: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    return torch.softmax((x * _SCALE).masked_fill(~below, float("-inf")), -1)


def _dropped(inputs: Mapping[str, Any], y: torch.Tensor) -> str:
    """Where a weight is left it is the softmax's, scaled; a tenth is gone."""
    x, found = inputs["x"][:1, :1], y[:1, :1].float()
    wanted = _causal(x.float(), inputs["below"])
    kept, live = found != 0, wanted > 0
    share = float(kept[live].float().mean())
    if abs(share - (1 - _P)) > 0.05:
        return f"it keeps {share:.1%} instead of {1 - _P:.1%}"
    away = float((found[kept] * (1 - _P) - wanted[kept]).norm() / wanted[kept].norm())
    return f"what it keeps is {away:.3g} away" if away > 0.02 else ""


def scores(device: torch.device, batch: int, heads: int, n: int, p: float) -> Problem:
    """Read up to the diagonal, written whole."""
    x = normal(device, batch, heads, n, n)
    below = torch.ones(n, n, dtype=torch.bool, device=device).tril()

    def eager(x: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
        y = _causal(x, below)
        return F.dropout(y, p, training=True) if p else y

    return Problem(
        {"x": x, "below": below},
        lambda x, below: softmax(x, _SCALE, diagonal=0, dropout_p=p, seed=20261122),
        eager,
        Work(moved(x) // 2 + moved(x)),
        backward=Work(moved(x) + moved(x)),
        grads=("x",),
        agrees=_dropped if p else None,
    )


def heated(device: torch.device, rows: int, n: int) -> Problem:
    """Probabilities at a temperature, of float32 logits."""
    x = normal(device, rows, n, dtype=torch.float32)
    return Problem({"x": x}, lambda x: softmax(x, 1 / 0.7), lambda x: torch.softmax(x / 0.7, -1), Work(2 * moved(x)))


def _widths() -> list[Row]:
    return [
        Row(
            "softmax",
            f"plain, width {n}",
            plain,
            {"rows": _ELEMENTS // n, "n": n, "compiled": False},
            {"rows": 9, "n": 300},
            bars(Bar("copy", 0.93, goal=True), over(Liger=1.3 if n > 32768 else 1.0)),
        )
        for n in (1024, 2048, 4096, 16384, 32768, 65536)
    ]


ROWS = [
    Row(
        "softmax",
        "plain, 32768x8192",
        plain,
        {"rows": 32768, "n": 8192},
        {"rows": 9, "n": 300},
        bars(Bar("copy", 0.90), Bar("copy", 0.93, goal=True), over(compile=1.0, Liger=1.0)),
        backward=True,
    ),
    Row(
        "softmax",
        "plain, 8192x8192",
        plain,
        {"rows": 8192, "n": 8192},
        {"rows": 9, "n": 300},
        bars(over(best=0.98), Bar("copy", 0.93, goal=True)),
        backward=True,
    ),
    Row(
        "softmax",
        "plain, 16384x131072",
        plain,
        {"rows": 16384, "n": 131072},
        {"rows": 3, "n": 3000},
        bars(Bar("copy", 0.60), over(compile=1.0, Liger=1.3), Bar("copy", 0.93, goal=True)),
    ),
    Row(
        "softmax",
        "scale and mask, 32768x8192",
        masked,
        {"rows": 32768, "n": 8192},
        {"rows": 9, "n": 300},
        bars(Bar("copy", 0.90), over(eager=3.0, compile=1.0)),
        backward=True,
    ),
    *(
        Row(
            "softmax",
            f"scale, causal{', dropout 0.1' if p else ''}, 4x32x2048x2048",
            scores,
            {"batch": 4, "heads": 32, "n": 2048, "p": p},
            {"batch": 1, "heads": 2, "n": 65, "p": p},
            over(eager=3.0, compile=1.0),
            backward=True,
        )
        for p in (0.0, _P)
    ),
    Row(
        "softmax",
        "temperature, 256x128256 float32",
        heated,
        {"rows": 256, "n": 128256},
        {"rows": 3, "n": 3000},
        over(best=0.98),
    ),
    *_widths(),
]
