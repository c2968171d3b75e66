"""FlagGems: its fused operations, and operators of PyTorch that it replaces."""

# ruff: noqa: PLW0108 - the names of the lambdas' parameters are those of the inputs
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion import derived, dim, tensor, values
from tests.outside.census import formulas
from tests.outside.census.entry import Kernel, kernel
from tests.outside.census.formulas import EPS

CANCELS = {"low-precision-accumulation": "FlagGems 5.0.2: `var_mean` cancels"}
NAN = {"nan-mishandled": "FlagGems 5.0.2: argmax passes over NaN"}
INFINITE = {
    "nan-mishandled": "FlagGems 5.0.2: `topk` of infinite numbers",
    "unexplained": "FlagGems 5.0.2: a negative zero in `topk` flips the sign of another number",
}
LEFT = {"ignores-strides": "FlagGems 5.0.2: `fused_add_rms_norm` leaves a tensor that is not contiguous as it was"}


def skip_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return formulas.layer_norm(x + residual, weight, bias)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    residual += x
    x.copy_(formulas.rms_norm(residual, weight))


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[: len(q), None], sin[: len(q), None]

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)

    return turned(q), turned(k)


def cosines(seq: int, half: int, q: Tensor) -> Tensor:
    return formulas.angles(seq, half, q).cos().to(q.dtype)


def sines(seq: int, half: int, q: Tensor) -> Tensor:
    return formulas.angles(seq, half, q).sin().to(q.dtype)


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return formulas.layer_norm(x, weight, bias)


def imported() -> Any:
    """``flag_gems``; with no GPU to be found it must know whose the kernels are for."""
    os.environ.setdefault("GEMS_VENDOR", "nvidia")
    if torch.cuda.device_count() == 0:
        from tests.outside.survey.jit_functions import passing_for_jit_functions

        with passing_for_jit_functions(torch):
            import flag_gems
    import flag_gems

    return flag_gems


def kernels() -> list[Kernel]:
    gems = imported()
    ops, fused = gems.ops, gems.fused

    rows = {"rows": dim(1), "n": dim(1, 8192)}
    x = {"x": tensor("rows n")}
    pair = {"x": tensor("rows n"), "y": tensor("rows n")}
    affine = {"x": tensor("rows n"), "weight": tensor("n"), "bias": tensor("n")}
    matrices = {"m": dim(1, 80), "k": dim(1, 80), "n": dim(1, 80)}

    def shape(weight: Tensor) -> Sequence[int]:
        return tuple(weight.shape)

    def added(x: Tensor, residual: Tensor, weight: Tensor) -> None:
        fused.fused_add_rms_norm(x, residual, shape(weight), weight, EPS)

    def reduced(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0], x.shape[2], dtype=x.dtype, device=x.device)
        fused.moe_sum(x, out)
        return out

    return [
        kernel("silu_and_mul", lambda x, y: fused.silu_and_mul(x, y), lambda x, y: F.silu(x) * y, pair, dims=rows,
               grad=True),
        kernel("gelu_and_mul", lambda x, y: fused.gelu_and_mul(x, y), formulas_gelu, pair, dims=rows, grad=True),
        kernel("gelu_and_mul, tanh", lambda x, y: fused.gelu_and_mul(x, y, "tanh"),
               lambda x, y: F.gelu(x, approximate="tanh") * y, pair, dims=rows, grad=True),
        kernel("skip_layer_norm", lambda x, residual, weight, bias:
               fused.skip_layer_norm(x, residual, shape(weight), weight, bias, EPS), skip_layer_norm,
               {**affine, "residual": tensor("rows n")}, dims=rows),
        kernel("fused_add_rms_norm", added, add_rms_norm,
               {"x": tensor("rows n"), "residual": tensor("rows n"), "weight": tensor("n")}, dims=rows,
               mutates=("x", "residual"), proved=LEFT),
        kernel("apply_rotary_pos_emb", lambda q, k, cos, sin:
               tuple(fused.apply_rotary_pos_emb(q[None], k[None], cos, sin)[i][0] for i in (0, 1)), rope,
               {"q": tensor("seq heads 2*half"), "k": tensor("seq kv_heads 2*half"), "cos": derived(cosines),
                "sin": derived(sines)},
               dims={"seq": dim(1), "heads": dim(1, 8), "kv_heads": dim(1, 8), "half": dim(1, 64)}),
        kernel("moe_sum", reduced, lambda x: x.sum(1), {"x": tensor("tokens experts n")},
               dims={"tokens": dim(1), "experts": dim(1, 8), "n": dim(1, 4096)}),
        kernel("rms_norm", lambda x, weight: ops.rms_norm(x, shape(weight), weight, EPS), formulas.rms_norm,
               {"x": tensor("rows n"), "weight": tensor("n")}, dims=rows, grad=True),
        kernel("layer_norm", lambda x, weight, bias: ops.layer_norm(x, shape(weight), weight, bias, EPS)[0], normed,
               affine, dims=rows),
        kernel("softmax", lambda x: ops.softmax(x, -1), lambda x: x.softmax(-1), x, dims=rows),
        kernel("log_softmax", lambda x: ops.log_softmax(x, -1), lambda x: x.log_softmax(-1), x, dims=rows),
        kernel("gelu", lambda x: ops.gelu(x), lambda x: F.gelu(x), x, dims=rows),
        kernel("silu", lambda x: ops.silu(x), lambda x: F.silu(x), x, dims=rows),
        kernel("cumsum", lambda x: ops.cumsum(x, 1), lambda x: x.cumsum(1), x, dims=rows),
        kernel("argmax", lambda x: ops.argmax(x, dim=1), lambda x: x.argmax(1), x, dims=rows, proved=NAN),
        kernel("sum over rows", lambda x: ops.sum_dim(x, [0]), lambda x: x.sum(0), x, dims=rows),
        kernel("mean over columns", lambda x: ops.mean_dim(x, [1]), lambda x: x.mean(1), x, dims=rows),
        kernel("var_mean", lambda x: ops.var_mean(x, [1], correction=1), lambda x: torch.var_mean(x, 1), x,
               dims={"rows": dim(1), "n": dim(2, 8192)}, proved=CANCELS),
        kernel("mm", lambda x, y: ops.mm(x, y), lambda x, y: x @ y, {"x": tensor("m k"), "y": tensor("k n")},
               dims=matrices),
        kernel("addmm", lambda bias, x, y: ops.addmm(bias, x, y), lambda bias, x, y: torch.addmm(bias, x, y),
               {"bias": tensor("n"), "x": tensor("m k"), "y": tensor("k n")}, dims=matrices),
        kernel("bmm", lambda x, y: ops.bmm(x, y), lambda x, y: x @ y,
               {"x": tensor("batch m k"), "y": tensor("batch k n")}, dims={**matrices, "batch": dim(1, 4)}),
        kernel("embedding", lambda weight, index: ops.embedding(weight, index),
               lambda weight, index: F.embedding(index, weight),
               {"weight": tensor("vocab n"),
                "index": tensor("rows", dtype=torch.int64, values=values.indices("vocab"))},
               dims={"vocab": dim(1), "n": dim(1, 4096), "rows": dim(1)}),
        kernel("topk", lambda x: ops.topk(x, 4), lambda x: torch.topk(x, 4), x,
               dims={"rows": dim(1), "n": dim(4, 8192)}, proved=INFINITE),
    ]  # fmt: skip


def formulas_gelu(x: Tensor, y: Tensor) -> Tensor:
    return F.gelu(x) * y
