"""The Triton kernels of flash-attn: norms, rotary embedding, cross entropy. Its CUDA extension is not needed."""

# ruff: noqa: PLW0108 - the names of the lambdas' parameters are those of the inputs
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from pytest_fusion import derived, dim, tensor
from tests.outside.census import formulas
from tests.outside.census.entry import Kernel, kernel, without_init
from tests.outside.census.formulas import EPS

CONSTANT = dict.fromkeys(
    ("unexplained", "cast-order"), "flash-attn 2.8.3: layer norm of a residual sum that is constant has a gradient"
)
ONE_CLASS = dict.fromkeys(
    ("raises", "does-not-compile"), "flash-attn 2.8.3: cross entropy does not compile for one class"
)


def cosines(seq: int, half: int, x: Tensor) -> Tensor:
    return formulas.angles(seq, half, x).cos().to(x.dtype)


def sines(seq: int, half: int, x: Tensor) -> Tensor:
    return formulas.angles(seq, half, x).sin().to(x.dtype)


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1).float()


def kernels() -> list[Kernel]:
    without_init("flash_attn", "flash_attn.ops", "flash_attn.layers")
    from flash_attn.layers.rotary import apply_rotary_emb
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    rows = {"rows": dim(1), "n": dim(1, 8192)}
    normed = {"x": tensor("rows n"), "weight": tensor("n")}
    return [
        kernel("rms_norm_fn", lambda x, weight: rms_norm_fn(x, weight, None, eps=EPS), formulas.rms_norm, normed,
               dims=rows, grad=True),
        kernel("layer_norm_fn", lambda x, weight, bias: layer_norm_fn(x, weight, bias, eps=EPS), formulas.layer_norm,
               {**normed, "bias": tensor("n")}, dims=rows, grad=True),
        kernel("layer_norm_fn, residual", lambda x, weight, bias, residual:
               layer_norm_fn(x, weight, bias, residual=residual, prenorm=True, eps=EPS), formulas.residual_layer_norm,
               {**normed, "bias": tensor("n"), "residual": tensor("rows n")}, dims=rows, grad=True, proved=CONSTANT),
        kernel("rotary", lambda x, cos, sin: apply_rotary_emb(x, cos, sin), formulas.rotary,
               {"x": tensor("batch seq heads 2*half"), "cos": derived(cosines), "sin": derived(sines)},
               dims={"batch": dim(1, 3), "seq": dim(1), "heads": dim(1, 8), "half": dim(1, 64)}, grad="x"),
        kernel("cross_entropy_loss", lambda logits, target: cross_entropy_loss(logits, target, label_smoothing=0.1)[0],
               smoothed, {"logits": tensor("rows vocab"), "target": derived(formulas.labels)}, wide=(0,),
               dims={"rows": dim(1), "vocab": dim(1, 32768)}, grad=True, proved=ONE_CLASS),
    ]  # fmt: skip
