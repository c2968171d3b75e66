"""Kernels that are wrong in one way each, what is right beside them, and changes that make a case show it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from pytest_fusion.case.case_model import Case, Layout
from pytest_fusion.spec.inputs import tensor

T = torch.Tensor
ROWS = {"x": tensor("rows hidden")}
PLAIN = {"dim rows": 3, "dim hidden": 5}
BIG = {"dim rows": 5, "dim hidden": 33}


def laid(kind: str, offset: int = 0, variant: int = 0, name: str = "x") -> Callable[[Case], Case]:
    return lambda case: case.with_tensor(name, layout=Layout(kind, offset, variant))


def valued(regime: str, dtype: str = "") -> Callable[[Case], Case]:
    def change(case: Case) -> Case:
        for name in case.tensors:
            case = case.with_tensor(name, regime=regime, **({"dtype": dtype} if dtype else {}))
        return case.with_(dtype=dtype or case.dtype)

    return change


def double(x: T) -> T:
    return x * 2


def triple(x: T) -> T:
    return x * 3


def triple_and_one(x: T) -> T:
    return x * 3 + 1


def mean_by_one_less(x: T) -> T:
    return (x.float().sum(-1) / max(x.shape[-1] - 1, 1)).to(x.dtype)


def softmax(x: T) -> T:
    return torch.softmax(x.float(), -1).to(x.dtype)


def total(x: T) -> T:
    return x.float().sum(-1).to(x.dtype)


def assumes_contiguous(x: T) -> T:
    """Reads as many elements as there are from where the tensor begins, and from there again if there are too few."""
    there = x.untyped_storage().size() // x.element_size() - x.storage_offset()
    flat = torch.as_strided(x, (there,), (1,), x.storage_offset())
    return double(flat[torch.arange(x.numel()) % there].reshape(x.shape)) if x.numel() else double(x)


def assumes_rows_far_apart(x: T) -> T:
    return double(x) if x.stride(0) or x.shape[0] < 2 else torch.zeros_like(x)


def starts_at_storage(x: T) -> T:
    return double(torch.as_strided(x, x.shape, x.stride(), 0))


def needs_alignment(x: T) -> T:
    return double(x) if x.storage_offset() * x.element_size() % 16 == 0 else torch.zeros(x.shape, dtype=x.dtype)


def assumes_matrices_side_by_side(x: T) -> T:
    _, rows, hidden = x.stride()
    return torch.as_strided(x, x.shape, (x.shape[1] * rows, rows, hidden), x.storage_offset()) * 2


def needs_aligned_rows(x: T) -> T:
    return double(x) if x.is_contiguous() or x.stride(0) % 4 == 0 else torch.zeros(x.shape, dtype=x.dtype)


def drops_tail(x: T, tile: int = 16) -> T:
    whole = x.shape[1] // tile * tile
    return torch.cat([x[:, :whole] * 2, x[:, whole:]], 1)


def drops_tail_of_sum(x: T) -> T:
    return total(x[:, : x.shape[1] // 16 * 16])


def pads_maximum_with_zero(x: T) -> T:
    if x.shape[1] % 16 == 0:
        return x.amax(-1)
    return torch.cat([x, x.new_zeros(x.shape[0], 1)], 1).amax(-1)


def pads_softmax_with_zero(x: T) -> T:
    pad = -x.shape[1] % 16
    wide = torch.cat([x, x.new_zeros(x.shape[0], pad)], 1) if x.shape[0] else x
    return softmax(wide)[:, : x.shape[1]].contiguous()


def stops_at_limit(x: T) -> T:
    return torch.cat([x[:, :32] * 2, torch.zeros_like(x[:, 32:])], 1)


def misses_carry(x: T) -> T:
    return torch.cat([part.cumsum(1) for part in x.split(32, 1)], 1) if x.shape[1] else x.clone()


def copies_rows_by_fours(x: T) -> T:
    """Whole vectors of four from each row, which compiled code reads and writes past both tensors."""
    x, out = x.contiguous(), torch.empty(x.shape)
    pitch, vectors = x.shape[1] * 4, -(-x.shape[1] // 4)
    for row in range(x.shape[0]):
        ctypes.memmove(out.data_ptr() + row * pitch, x.data_ptr() + row * pitch, vectors * 16)
    return out


def exponentials(x: T) -> T:
    weight = x.float().exp()
    return (weight / weight.sum(-1, keepdim=True)).to(x.dtype)


def swaps_rows(x: T) -> T:
    return (x * 2).flip(0)


def first_row_only(x: T, w: T) -> T:
    return x * w[:, :1]


def mixes_rows(x: T) -> T:
    out = x * 2
    out[1:] += x[:1]
    return out


def norm(x: T, eps: float) -> T:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_with_eps_outside(x: T, eps: float) -> T:
    return (x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype)


def scale(x: T) -> T:
    return x.float() / x.float().abs().amax(-1, keepdim=True).clamp(min=0.01)


def scale_with_small_floor(x: T) -> T:
    return x.float() / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-7)


def norm_of_constant(x: T) -> T:
    return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3)


def norm_with_constant_inside(x: T) -> T:
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()


def step(x: T, w: T, rate: float) -> T:
    return w - rate * torch.tanh(x)


def long_step(x: T, w: T, rate: float) -> T:
    return w - 1.05 * rate * torch.tanh(x)


def norm_with_offset(x: T) -> T:
    return norm_of_constant(x) + 1e-3


def centred_norm(x: T, w: T, b: T, eps: float) -> T:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, eps)


def centred_norm_without_bias(x: T, w: T, b: T, eps: float) -> T:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, None, eps)


def masked_softmax(x: T, keep: T) -> T:
    return torch.softmax(x.masked_fill(~keep, -torch.inf), -1)


def masks_after_maximum(x: T, keep: T) -> T:
    weight = (x - x.amax(-1, keepdim=True)).exp() * keep
    return weight / weight.sum(-1, keepdim=True)


def pads_exponential_by_product(x: T) -> T:
    """0 stands in the lanes that pad the last tile, and is taken away from a maximum that it is no part of."""
    pad = -x.shape[1] % 16
    wide = torch.cat([x, x.new_zeros(x.shape[0], pad)], 1)
    weight = (wide - x.amax(-1, keepdim=True)).exp() * (torch.arange(wide.shape[1]) < x.shape[1])
    return (weight / weight.sum(-1, keepdim=True))[:, : x.shape[1]].contiguous()


def cuts_at_threshold(x: T) -> T:
    return torch.where(x <= 20.0, torch.nn.functional.softplus(x), 0.0)


def pairs_of_odd_width(x: T) -> T:
    out = double(x)
    return out if x.is_contiguous() or x.shape[1] % 2 == 0 else out.index_fill(1, torch.tensor([x.shape[1] - 1]), 0)


def to_float8(x: T) -> T:
    return x.to(torch.float8_e4m3fn)


def to_float8_by_bfloat16(x: T) -> T:
    return x.to(torch.bfloat16).to(torch.float8_e4m3fn)


def sums_in_input_dtype(x: T) -> T:
    acc = torch.zeros(x.shape[0], dtype=x.dtype)
    for column in x.unbind(1):
        acc = acc + column
    return acc


def affine(x: T) -> T:
    return ((x.float() * 1.7) * 0.9).to(x.dtype)


def affine_cast_between(x: T) -> T:
    return ((x.float() * 1.7).to(x.dtype).float() * 0.9).to(x.dtype)


def matmul(x: T, w: T) -> T:
    return x @ w


def matmul_in_bfloat16(x: T, w: T) -> T:
    return (x.to(torch.bfloat16).float() @ w.to(torch.bfloat16).float()).to(x.dtype)


def variance(x: T) -> T:
    return x.var(-1, correction=0)


def naive_variance(x: T) -> T:
    return x.square().mean(-1) - x.mean(-1).square()


def relu_beside_nan(x: T) -> T:
    return torch.relu(x) + x.sum(-1, keepdim=True) * 0


def fails_when_empty(x: T) -> T:
    return double(x) if x.numel() else torch.full((x.shape[1],), 3.0, dtype=x.dtype)


def total_of_rows(x: T) -> T:
    return x.sum(0)


def wrong_gelu(x: T) -> T:
    return torch.nn.functional.gelu(x, approximate="tanh")


def negated(x: T) -> T:
    return -double(x)


def caching() -> Callable[[T, T], T]:
    kept: dict[Any, T] = {(3, 5): torch.ones(3, 5)}

    def fused(x: T, w: T) -> T:
        return x * kept.setdefault(tuple(w.shape), w.clone())

    return fused


def times(x: T, w: T) -> T:
    return x * w


def hidden_mask(x: T, keep: T) -> T:
    return torch.where(keep, x, 0.0).sum(-1)


def multiplies_mask(x: T, keep: T) -> T:
    return (x * keep).sum(-1)


def second_and_third(rows: int, hidden: int) -> T:
    """Where the NaN of a case is not: those are in the first lane and in the last two."""
    return ((torch.arange(hidden) == 1) | (torch.arange(hidden) == 2)).expand(rows, hidden).contiguous()


def scaled(how: str) -> Callable[[T, T], T]:
    """``x * (1 + w)``; its backward may lack all but the upstream gradient's mean in the 1, or take it backwards."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: T, w: T) -> T:
            ctx.save_for_backward(w)
            return x * (1 + w)

        @staticmethod
        def backward(ctx: Any, g: T) -> tuple[T, None]:
            (w,) = ctx.saved_tensors
            if how == "backwards":
                g = g.flip(-1)
            return (g * w + g.mean(-1, keepdim=True) if how == "mean" else g * (1 + w)), None

    return Scaled.apply
