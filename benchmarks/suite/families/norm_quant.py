"""Normalisation and quantisation in one launch."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.suite.families.made import near_one, normal
from benchmarks.suite.model import Bar, Problem, Row, Work, bars, moved, over
from reference_kernels.norm_quant import add_norm_quant, norm_quant

_EPS = 1e-6
_LIMITS = {"fp8": 448.0, "int8": 127.0}
SMALL = {"rows": 9, "n": 256}


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS) * weight.float()


def _coded(y: torch.Tensor, codes: str, group: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    parts = y.view(*y.shape[:-1], -1, group or y.shape[-1])
    scales = parts.abs().amax(-1).clamp_min(1e-10) / _LIMITS[codes]
    scaled = (parts / scales.unsqueeze(-1)).flatten(-2).clamp(-_LIMITS[codes], _LIMITS[codes])
    return scaled.round().to(torch.int8) if codes == "int8" else scaled.to(torch.float8_e4m3fn), scales


def quantised(device: torch.device, rows: int, n: int, codes: str = "fp8", group: int | None = None) -> Problem:
    x, weight = normal(device, rows, n), near_one(device, n)
    groups = n // group if group else 1
    return Problem(
        {"x": x, "weight": weight},
        lambda x, weight: norm_quant(x, weight, None, _EPS, "rms", codes, group),  # type: ignore[arg-type]
        lambda x, weight: _coded(_normed(x, weight), codes, group),
        Work(moved(x) + x.numel() + 4 * rows * groups),
    )


def with_residual(device: torch.device, rows: int, n: int) -> Problem:
    x, residual, weight = normal(device, rows, n), normal(device, rows, n), near_one(device, n)

    def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x + residual
        return *_coded(_normed(total, weight), "fp8", None), total

    return Problem(
        {"x": x, "residual": residual, "weight": weight},
        lambda x, residual, weight: add_norm_quant(x, residual, weight, None, _EPS, "rms", "fp8", None),
        eager,
        Work(3 * moved(x) + x.numel() + 4 * rows),
    )


_BARS = bars(Bar("copy", 0.85), over(eager=4.0, compile=1.05))
_TALL, _SQUARE = {"rows": 16384, "n": 8192}, {"rows": 8192, "n": 8192}

ROWS = [
    Row("norm_quant", "rms, fp8, 16384x8192", quantised, _TALL, SMALL, bars(_BARS, Bar("us", 110))),
    Row("norm_quant", "rms, fp8, 8192x8192", quantised, _SQUARE, SMALL, bars(Bar("copy", 0.85), over(best=0.98))),
    Row(
        "norm_quant",
        "residual, rms, fp8, 16384x8192",
        with_residual,
        _TALL,
        SMALL,
        bars(_BARS, Bar("us", 257)),
    ),
    Row(
        "norm_quant",
        "rms, fp8 by 128, 16384x8192",
        quantised,
        {**_TALL, "group": 128},
        {**SMALL, "group": 128},
        _BARS,
    ),
    Row(
        "norm_quant", "rms, int8, 16384x8192", quantised, {**_TALL, "codes": "int8"}, {**SMALL, "codes": "int8"}, _BARS
    ),
]
