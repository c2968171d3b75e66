"""Gated linear units: SwiGLU and GeGLU, halves apart and packed."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import liger, normal
from benchmarks.suite.model import LIGER, Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.glu import glu, glu_packed

SMALL = {"rows": 33, "n": 100}


def swiglu(device: torch.device, rows: int, n: int) -> Problem:
    gate, up = normal(device, rows, n), normal(device, rows, n)
    # Its backward pass writes the gradients over gate and up.
    of_liger = Way(liger("swiglu", "LigerSiLUMulFunction"), mutates=("both",))
    return Problem(
        {"gate": gate, "up": up},
        lambda gate, up: glu(gate, up, "silu"),
        lambda gate, up: F.silu(gate) * up,
        Work(3 * moved(gate)),
        {LIGER: of_liger},
        backward=Work(5 * moved(gate)),
        grads=("gate", "up"),
    )


def geglu(device: torch.device, rows: int, n: int) -> Problem:
    gate, up = normal(device, rows, n), normal(device, rows, n)
    of_liger = Way(liger("geglu", "LigerGELUMulFunction"), mutates=("both",))
    return Problem(
        {"gate": gate, "up": up},
        lambda gate, up: glu(gate, up, "gelu_tanh"),
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        Work(3 * moved(gate)),
        {LIGER: of_liger},
        backward=Work(5 * moved(gate)),
        grads=("gate", "up"),
    )


def _packed(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def packed(device: torch.device, rows: int, n: int) -> Problem:
    x = normal(device, rows, 2 * n)
    return Problem(
        {"x": x},
        lambda x: glu_packed(x, "silu"),
        _packed,
        Work(moved(x) * 3 // 2),
        backward=Work(moved(x) * 5 // 2),
        grads=("x",),
        compiles=None,
    )


_BARS = bars(
    Bar("copy", 0.92),
    over(eager=1.5, compile=0.97, Liger=1.0),
    Bar("copy", 0.88, "backward"),
    over("backward", eager=1.6, compile=0.97, Liger=1.0),
)

ROWS = [
    Row("glu", "SwiGLU, 16384x14336", swiglu, {"rows": 16384, "n": 14336}, SMALL, _BARS, backward=True),
    Row(
        "glu",
        "SwiGLU, 8192x14336",
        swiglu,
        {"rows": 8192, "n": 14336},
        SMALL,
        bars(over(best=0.98), over("both", best=0.98)),
        backward=True,
    ),
    Row("glu", "GeGLU (tanh), 16384x14336", geglu, {"rows": 16384, "n": 14336}, SMALL, _BARS, backward=True),
    Row("glu", "SwiGLU, packed, 16384x14336", packed, {"rows": 16384, "n": 14336}, SMALL, _BARS[:2], backward=True),
]
