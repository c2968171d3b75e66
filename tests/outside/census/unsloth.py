"""The Triton kernels of Unsloth. Its models, and with them Transformers, are not needed."""

# ruff: noqa: PLW0108 - the names of the lambdas' parameters are those of the inputs
from __future__ import annotations

import logging
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion import derived, dim, tensor
from tests.outside.census import formulas
from tests.outside.census.entry import Kernel, kernel, stand_in, without_init
from tests.outside.census.formulas import EPS, rotated


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    return formulas.rms_norm(x, weight + 1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, cos, sin), rotated(k, cos, sin)


def cosines(seq: int, half: int, q: Tensor) -> Tensor:
    angle = formulas.angles(seq, half, q)
    return torch.cat((angle, angle), -1).cos().to(q.dtype)


def sines(seq: int, half: int, q: Tensor) -> Tensor:
    angle = formulas.angles(seq, half, q)
    return torch.cat((angle, angle), -1).sin().to(q.dtype)


def swiglu_backward(dw: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The product, the upstream gradient times the gate's value, and the gate's gradient."""
    sigmoid = e.sigmoid()
    value = e * sigmoid
    return value * g, dw * value, dw * g * sigmoid * (1 + e * (1 - sigmoid))


def imported() -> None:
    """Makes ``unsloth.kernels`` importable: what the kernels need of other packages is a version and a logger."""
    from packaging.version import Version

    os.environ.setdefault("UNSLOTH_ALLOW_CPU", "1")
    without_init("unsloth", "unsloth.kernels")

    def as_it_is(*arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments else as_it_is

    def none(*_: Any, **__: Any) -> None:
        return None

    logger = logging.getLogger("unsloth")
    stand_in("unsloth_zoo.utils", Version=Version)
    stand_in("unsloth_zoo.log", logger=logger)
    stand_in("unsloth_zoo.temporary_patches.common", torch_compile=as_it_is)
    stand_in("unsloth_zoo.patching_utils", patch_layernorm=none)
    stand_in("unsloth_zoo.loss_utils", patch_loss_functions=none, post_patch_loss_function=none)
    stand_in("transformers.models.llama.modeling_llama", LlamaRMSNorm=torch.nn.Module, logger=logger)


def kernels() -> list[Kernel]:
    imported()
    from unsloth.kernels.cross_entropy_loss import Fast_CrossEntropyLoss
    from unsloth.kernels.geglu import geglu_approx_forward_kernel, geglu_exact_forward_kernel
    from unsloth.kernels.layernorm import Fast_Layernorm
    from unsloth.kernels.rms_layernorm import Fast_RMS_Layernorm
    from unsloth.kernels.rope_embedding import fast_rope_embedding
    from unsloth.kernels.swiglu import swiglu_DWf_DW_dfg_kernel, swiglu_fg_kernel

    rows = {"batch": dim(1), "seq": dim(1), "n": dim(1, 8192)}
    normed = {"x": tensor("batch seq n"), "weight": tensor("n")}
    pair = {"a": tensor("batch seq n"), "b": tensor("batch seq n")}
    flat = {name: tensor("rows n") for name in ("dw", "e", "g")}
    return [
        kernel("rms_layernorm", lambda x, weight: Fast_RMS_Layernorm.apply(x, weight, EPS, False, False, False),
               formulas.rms_norm, normed, dims=rows, grad="x"),
        kernel("rms_layernorm, gemma", lambda x, weight:
               Fast_RMS_Layernorm.apply(x, weight, EPS, True, False, False), gemma, normed, dims=rows, grad="x"),
        kernel("layernorm", lambda x, weight, bias: Fast_Layernorm.apply(x, weight, bias, EPS), formulas.layer_norm,
               {**normed, "bias": tensor("n")}, dims=rows, grad="x"),
        kernel("swiglu, forward", lambda a, b: swiglu_fg_kernel(a, b), formulas.swiglu, pair, dims=rows),
        kernel("swiglu, backward", lambda dw, e, g: tuple(part.clone() for part in swiglu_DWf_DW_dfg_kernel(dw, e, g)),
               swiglu_backward, flat, dims={"rows": dim(1), "n": dim(1, 8192)}, clobbers=("dw", "e", "g")),
        kernel("geglu, exact", lambda a, b: geglu_exact_forward_kernel(a, b), formulas.geglu_erf, pair, dims=rows),
        kernel("geglu, tanh", lambda a, b: geglu_approx_forward_kernel(a, b), formulas.geglu_tanh, pair, dims=rows),
        kernel("rope_embedding", lambda q, k, cos, sin:
               tuple(part.clone() for part in fast_rope_embedding(q, k, cos, sin)), rope,
               {"q": tensor("batch heads seq 2*half"), "k": tensor("batch kv_heads seq 2*half"),
                "cos": derived(cosines), "sin": derived(sines)},
               dims={"batch": dim(1, 3), "heads": dim(1, 8), "kv_heads": dim(1, 8), "seq": dim(2, 40),
                     "half": dim(1, 64)}, grad=("q", "k"), clobbers=("q", "k")),
        kernel("cross_entropy_loss", lambda logits, target: Fast_CrossEntropyLoss.apply(logits * 1, target, 0, 0),
               lambda logits, target: F.cross_entropy(logits, target, reduction="none").float(),
               {"logits": tensor("rows vocab"), "target": derived(formulas.labels)}, wide=(0,),
               dims={"rows": dim(1), "vocab": dim(1, 65536)}, grad="logits"),
    ]  # fmt: skip
