"""Linear layers: activation, three projections at once, gate and up, low-rank adaptation."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

from benchmarks.suite.families.made import normal
from benchmarks.suite.model import Bar, Problem, Row, Way, Work, bars, moved, over
from reference_kernels.glu import glu_packed
from reference_kernels.linear import gate_up_linear, linear, lora_linear, qkv_linear

_CUBLAS = "cuBLAS, product alone"


def _product(rows: int, columns: int, depth: int, itemsize: int = 2) -> Work:
    return Work(itemsize * (rows * depth + columns * depth + rows * columns), 2 * rows * columns * depth)


def _product_alone(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight, bias)


def activated(
    device: torch.device, rows: int, n: int, k: int, activation: Literal["gelu", "relu", "silu"] | None
) -> Problem:
    x, weight, bias = normal(device, rows, k), normal(device, n, k, scale=k**-0.5), normal(device, n)
    apply: Any = {"gelu": F.gelu, "relu": torch.relu, "silu": F.silu, None: lambda y: y}[activation]
    others = {}
    if activation is not None:
        others[_CUBLAS] = Way(_product_alone, part=True)
    if activation == "relu":
        others["cuBLASLt epilogue"] = Way(lambda x, weight, bias: torch._addmm_activation(bias, x, weight.t()))
    return Problem(
        {"x": x, "weight": weight, "bias": bias},
        lambda x, weight, bias: linear(x, weight, bias, activation),
        lambda x, weight, bias: apply(F.linear(x, weight, bias)),
        _product(rows, n, k),
        others,
    )


def projections(device: torch.device, rows: int, k: int, n: int, kv: int) -> Problem:
    x = normal(device, rows, k)
    query, key, value = (normal(device, each, k, scale=k**-0.5) for each in (n, kv, kv))
    whole = torch.cat((query, key, value))

    def eager(x: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, whole: Any) -> Any:  # noqa: ARG001
        return F.linear(x, query), F.linear(x, key), F.linear(x, value)

    return Problem(
        {"x": x, "query": query, "key": key, "value": value, "whole": whole},
        lambda x, query, key, value, whole: qkv_linear(x, query, key, value),
        eager,
        _product(rows, n + 2 * kv, k),
        {"one product, weights joined": Way(lambda x, whole, **_: torch.split(F.linear(x, whole), [n, kv, kv], -1))},
        compiles=None,
    )


def gate_up(device: torch.device, rows: int, k: int, n: int) -> Problem:
    x = normal(device, rows, k)
    gate, up = (normal(device, n, k, scale=k**-0.5) for _ in range(2))
    whole = torch.cat((gate, up))

    def eager(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    return Problem(
        {"x": x, "gate": gate, "up": up, "whole": whole},
        lambda x, gate, up, whole: gate_up_linear(x, gate, up),
        eager,
        Work(_product(rows, n, k).bytes + moved(up), 4 * rows * n * k),
        {_JOINED: Way(lambda x, whole, **_: glu_packed(F.linear(x, whole), "silu"))},
        compiles=None,
    )


_JOINED = "cuBLAS and one swiglu"


def lora(device: torch.device, rows: int, n: int, k: int, r: int, compiled: bool = True) -> Problem:
    x, weight = normal(device, rows, k), normal(device, n, k, scale=k**-0.5)
    down, up = normal(device, r, k, scale=k**-0.5), normal(device, n, r)

    def eager(x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) + 2.0 * F.linear(F.linear(x, down), up)

    def joined(x: torch.Tensor, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.addmm(F.linear(x, weight), F.linear(x, down), up.t(), alpha=2.0)

    flops = 2 * rows * n * k + 2 * rows * r * (n + k)
    return Problem(
        {"x": x, "weight": weight, "down": down, "up": up},
        lambda x, weight, down, up: lora_linear(x, weight, down, up, 2.0),
        eager,
        Work(moved(x, weight, down, up) + 2 * rows * n, flops),
        {"addmm": Way(joined)},
        # By x as forward; by the thin factors two products each.
        backward=Work(moved(x, weight, down, up) + 2 * rows * (n + k), flops + 4 * rows * r * (n + k)),
        grads=("x", "down", "up"),
        compiles="eager" if compiled else None,
    )


def _activated(rows: int, n: int, k: int, activation: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {"rows": rows, "n": n, "k": k, "activation": activation},
        {"rows": 40, "n": 70, "k": 100, "activation": activation},
    )


ROWS = [
    Row(
        "linear",
        "bias, gelu, 8192^3",
        activated,
        *_activated(8192, 8192, 8192, "gelu"),
        bars(Bar("matmul", 0.80), Bar("matmul", 0.88, goal=True), over(eager=0.85), over(goal=True, best=0.98)),
    ),
    *(
        Row(
            "linear",
            f"bias, {activation}, 16384x8192, k 512",
            activated,
            *_activated(16384, 8192, 512, activation),
            over(eager=1.25, compile=1.0),
        )
        for activation in ("gelu", "relu")
    ),
    *(
        Row(
            "linear",
            f"queries, keys, values, {rows}x4096 to 4096+2x1024",
            projections,
            {"rows": rows, "k": 4096, "n": 4096, "kv": 1024},
            {"rows": 3, "k": 64, "n": 48, "kv": 16},
            over(eager=1.5),
        )
        for rows in (1, 16, 64)
    ),
    Row(
        "linear",
        "gate and up, 8192x4096 to 14336",
        gate_up,
        {"rows": 8192, "k": 4096, "n": 14336},
        {"rows": 40, "k": 64, "n": 70},
        bars(Bar(_JOINED, 0.92), over(eager=1.0)),
    ),
    *(
        Row(
            "linear",
            f"LoRA, r 16, {rows}x4096x4096",
            lora,
            {"rows": rows, "n": 4096, "k": 4096, "r": 16, "compiled": rows == 8192},
            {"rows": 40, "n": 70, "k": 64, "r": 16},
            # The result, and nothing of its size beside it.
            bars(
                over(eager=1.0) if rows == 4096 else over(best=0.98),
                Bar("gib", 1.25 * 2 * rows * 4096 / (1 << 30)),
                over(goal=True, eager=1.1),
            ),
            backward=True,
        )
        for rows in (4096, 8192)
    ),
]
