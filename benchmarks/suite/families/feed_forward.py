"""The feed-forward block of a transformer, and the projections around it as training has them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from benchmarks.suite.families.linear import gate_up, projections
from benchmarks.suite.families.made import normal
from benchmarks.suite.model import Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.glu import feed_forward, glu_packed

_JOINED = "cuBLAS, gate and up joined, one swiglu"


def block(device: torch.device, rows: int, k: int, n: int) -> Problem:
    x = normal(device, rows, k)
    gate, up = (normal(device, n, k, scale=k**-0.5) for _ in range(2))
    down = normal(device, k, n, scale=n**-0.5)
    whole = torch.cat((gate, up))

    def eager(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, **_: object) -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    flops = 6 * rows * n * k
    return Problem(
        {"x": x, "gate": gate, "up": up, "down": down, "whole": whole},
        lambda x, gate, up, down, whole: feed_forward(x, gate, up, down),
        eager,
        Work(moved(x, x, gate, up, down), flops),
        {
            _JOINED: Way(lambda x, down, whole, **_: F.linear(glu_packed(F.linear(x, whole), "silu"), down), part=True)
        },  # it has no gradients of gate and up apart
        backward=Work(2 * moved(x, gate, up, down), 2 * flops),
        grads=("x", "gate", "up", "down"),
        compiles=None,
    )


def trained_projections(device: torch.device, rows: int, k: int, n: int, kv: int) -> Problem:
    """As for decoding, with gradients; the joined weight has them elsewhere, and is left out."""
    found = projections(device, rows, k, n, kv)
    del found.inputs["whole"]
    work = found.work
    return replace(
        found,
        ours=lambda x, query, key, value: found.ours(x=x, query=query, key=key, value=value, whole=None),
        eager=lambda x, query, key, value: (F.linear(x, query), F.linear(x, key), F.linear(x, value)),
        others={},
        backward=Work(2 * work.bytes, 2 * work.flops),
        grads=("x", "query", "key", "value"),
    )


def trained_gate_up(device: torch.device, rows: int, k: int, n: int) -> Problem:
    found = gate_up(device, rows, k, n)
    del found.inputs["whole"]
    return replace(
        found,
        ours=lambda x, gate, up: found.ours(x=x, gate=gate, up=up, whole=None),
        eager=lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up),
        others={},
        backward=Work(2 * found.work.bytes, 2 * found.work.flops),
        grads=("x", "gate", "up"),
    )


_WIDE, _SMALL = {"rows": 8192, "k": 4096, "n": 14336}, {"rows": 40, "k": 64, "n": 70}
_GOAL = bars(over(goal=True, best=0.98), over("both", goal=True, best=0.98))

ROWS = [
    Row(
        "feed_forward",
        "SwiGLU block, 8192x4096 by 14336",
        block,
        _WIDE,
        _SMALL,
        bars(Bar(_JOINED, 0.92), Bar("matmul", 0.80), _GOAL),
        backward=True,
    ),
    Row(
        "linear",
        "queries, keys, values, trained, 8192x4096 to 4096+2x1024",
        trained_projections,
        {"rows": 8192, "k": 4096, "n": 4096, "kv": 1024},
        {"rows": 5, "k": 64, "n": 48, "kv": 16},
        _GOAL,
        backward=True,
    ),
    Row("linear", "gate and up, trained, 8192x4096 to 14336", trained_gate_up, _WIDE, _SMALL, _GOAL, backward=True),
]
