"""RMS and layer normalisation, alone and of a residual sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import liger, near_one, normal
from benchmarks.suite.model import LIGER, Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.layer_norm import add_layer_norm, layer_norm
from reference_kernels.rms_norm import add_rms_norm, rms_norm

_EPS = 1e-6
_ELEMENTS = 1 << 27
SMALL = {"rows": 9, "n": 300}


def _llama(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As ``LlamaRMSNorm`` of transformers has it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)
    return weight * wide.to(x.dtype)


def rms(device: torch.device, rows: int, n: int, compiled: bool = True) -> Problem:
    x, weight = normal(device, rows, n), near_one(device, n)
    others = {
        LIGER: Way(liger("rms_norm", "LigerRMSNormFunction", _EPS, 0.0, "llama", False)),
        "F.rms_norm": Way(lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, _EPS)),
    }
    return Problem(
        {"x": x, "weight": weight},
        lambda x, weight: rms_norm(x, weight, _EPS, "llama"),
        _llama,
        Work(2 * moved(x)),
        others,
        backward=Work(3 * moved(x)),
        grads=("x", "weight"),
        compiles="eager" if compiled else None,
    )


def _add_llama(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return _llama(total, weight), total


def add_rms(device: torch.device, rows: int, n: int) -> Problem:
    x, residual, weight = normal(device, rows, n), normal(device, rows, n), near_one(device, n)

    def of_torch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x + residual
        return F.rms_norm(total, x.shape[-1:], weight, _EPS), total

    return Problem(
        {"x": x, "residual": residual, "weight": weight},
        lambda x, residual, weight: add_rms_norm(x, residual, weight, _EPS, "llama"),
        _add_llama,
        Work(4 * moved(x)),
        {
            LIGER: Way(liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", _EPS, 0.0, "llama", False)),
            "F.rms_norm": Way(of_torch),
        },
        backward=Work(4 * moved(x)),
        grads=("x", "residual", "weight"),
    )


def layer(device: torch.device, rows: int, n: int, compiled: bool = True) -> Problem:
    x, weight, bias = normal(device, rows, n), near_one(device, n), normal(device, n)
    return Problem(
        {"x": x, "weight": weight, "bias": bias},
        lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5),
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5),
        Work(2 * moved(x)),
        {LIGER: Way(liger("layer_norm", "LigerLayerNormFunction", 1e-5))},
        backward=Work(3 * moved(x)),
        grads=("x", "weight", "bias"),
        compiles="eager" if compiled else None,
    )


def add_layer(device: torch.device, rows: int, n: int) -> Problem:
    x, residual, weight, bias = normal(device, rows, n), normal(device, rows, n), near_one(device, n), normal(device, n)

    def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        total = x + residual
        return F.layer_norm(total, x.shape[-1:], weight, bias, 1e-5), total

    return Problem(
        {"x": x, "residual": residual, "weight": weight, "bias": bias},
        lambda x, residual, weight, bias: add_layer_norm(x, residual, weight, bias, 1e-5),
        eager,
        Work(4 * moved(x)),
        backward=Work(4 * moved(x)),
        grads=("x", "residual", "weight", "bias"),
        compiles=None,
    )


_FORWARD = bars(Bar("copy", 0.90), Bar("copy", 0.93, goal=True), over(compile=0.97, Liger=1.0))
_BACKWARD = bars(
    Bar("copy", 0.70, "backward"),
    Bar("copy", 0.80, "backward", goal=True),
    over("backward", Liger=1.5, compile=0.95),
)
_TALL, _SQUARE = {"rows": 16384, "n": 8192}, {"rows": 8192, "n": 8192}
_BEST = bars(over(best=0.98), over("both", best=0.98))

ROWS = [
    Row(
        "rms_norm",
        "16384x8192",
        rms,
        _TALL,
        SMALL,
        bars(_FORWARD, Bar("us", 139), over(eager=3.0), _BACKWARD, Bar("us", 268, "backward")),
        backward=True,
    ),
    Row("rms_norm", "8192x8192", rms, _SQUARE, SMALL, _BEST, backward=True),
    Row(
        "rms_norm",
        "residual, 16384x8192",
        add_rms,
        _TALL,
        SMALL,
        bars(_FORWARD, _BACKWARD),
        backward=True,
    ),
    Row("rms_norm", "residual, 8192x8192", add_rms, _SQUARE, SMALL, over(best=0.98)),
    Row("layer_norm", "16384x8192", layer, _TALL, SMALL, bars(_FORWARD, _BACKWARD), backward=True),
    Row("layer_norm", "8192x8192", layer, _SQUARE, SMALL, _BEST, backward=True),
    Row("layer_norm", "residual, 16384x8192", add_layer, _TALL, SMALL, _FORWARD[:2], backward=True),
    *(
        Row(
            "rms_norm",
            f"width {n}",
            rms,
            {"rows": _ELEMENTS // n, "n": n, "compiled": False},
            SMALL,
            bars(
                Bar("copy", 0.93, goal=True),
                Bar("copy", 0.80, "backward", goal=True),
                over(Liger=1.0),
            ),
            backward=n in (1024, 16384, 65536),
        )
        for n in (1024, 2048, 4096, 16384, 32768, 65536, 131072)
    ),
    *(
        Row(
            "layer_norm",
            f"width {n}",
            layer,
            {"rows": _ELEMENTS // n, "n": n, "compiled": False},
            SMALL,
            bars(Bar("copy", 0.93, goal=True), over(Liger=1.0)),
        )
        for n in (1024, 32768, 131072)
    ),
]
