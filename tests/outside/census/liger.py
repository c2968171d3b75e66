"""Liger-Kernel, forward and backward."""

# ruff: noqa: PLW0108 - the names of the lambdas' parameters are those of the inputs
from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion import derived, dim, tensor, values
from tests.outside.census import formulas
from tests.outside.census.entry import Kernel, kernel
from tests.outside.census.formulas import EPS, rotated

# calculate_settings() raises past 65536 columns; of zero columns torch cannot tell the rows.
COLUMNS = dim(1, 65536)
UPSTREAM = dict.fromkeys(
    ("mutates-input", "upstream-overwritten"), "Liger-Kernel 0.8.5: backward writes into the upstream gradient"
)
CANCELS = "Liger-Kernel 0.8.5: group norm cancels, and overflows in float16"
NORMS = {
    **dict.fromkeys(("low-precision-accumulation", "overflow"), CANCELS),
    **dict.fromkeys(
        ("cast-order", "unexplained"), "Liger-Kernel 0.8.5: group norm rounds float16 gradients to bfloat16"
    ),
}
NARROW_HEADS = {"does-not-compile": "Liger-Kernel 0.8.5: neighborhood attention does not compile for narrow heads"}
ONE_TOKEN = dict.fromkeys(
    ("racing-load", "racing-stores", "ignores-strides", "needs-alignment"),
    "Liger-Kernel 0.8.5: RoPE of several sequences of one token is wrong",
)
MASKED = dict.fromkeys(
    ("unexplained", "nan-mishandled"),
    "Liger-Kernel 0.8.5: cross entropy is NaN where the first 32768 logits are masked",
)
COPIED = {"ignores-strides": "Liger-Kernel 0.8.5: the gradient of logits that are not contiguous is the logits"}
COPY = {"raises": "Liger-Kernel 0.8.5: a tiled MLP has no gradient for an input that is not contiguous"}
FROZEN = {"gradient-missing": "Liger-Kernel 0.8.5: fused linear cross entropy has no gradient for the weight alone"}
LOGARITHM = {"missing-max-subtraction": "Liger-Kernel 0.8.5: label smoothing over a split vocabulary is infinite"}
MASK = {"overflow": "Liger-Kernel 0.8.5: multi-token attention masks with -1e9"}
GRID = {"raises": "Liger-Kernel 0.8.5: the GRPO loss of 65536 tokens cannot be launched"}
TOTAL = dict.fromkeys(
    ("cast-order", "low-precision-accumulation"),
    "Liger-Kernel 0.8.5: the gradient of a softmax adds up in float16",
)
TABLE = {"low-precision-accumulation": "Liger-Kernel 0.8.5: the gradient of an embedding stops growing in 16 bits"}
POWERS = dict.fromkeys(("low-precision-accumulation", "overflow"), "Liger-Kernel 0.8.5: PolyNorm overflows in float16")
OVERWRITTEN = {"mutates-input": "Liger-Kernel 0.8.5: backward overwrites the inputs of SwiGLU and GEGLU"}


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def gemma(x: Tensor, weight: Tensor) -> Tensor:
    return unit(x) * (1 + weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return unit(total) * weight, total


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight[0] * unit(x**3) + weight[1] * unit(x**2) + weight[2] * unit(x) + bias


def modulated(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (1 + scale[:, None]) * (unit(x) * weight) + shift[:, None]


def sparsemax(x: Tensor) -> Tensor:
    """Martins and Astudillo, ICML 2016, equations 4 to 6. What is 0 is outside of the support: no gradient."""
    ordered = x.sort(-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    size = (1 + ranks * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    if not bool(size.all()):
        raise ValueError("rounding, or NaN, leaves nothing in the support")
    threshold = (ordered.cumsum(-1).gather(-1, size - 1) - 1) / size
    return (x - threshold).relu()


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, cos[:, None], sin[:, None]), rotated(k, cos[:, None], sin[:, None])


def mrope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Angles of time, height and width, each for a section of both halves."""
    sections = (2, 3, 3, 2, 3, 3)
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(table.split(sections, -1))], -1)[:, None]
        for table in (cos, sin)
    )
    return rotated(q, cos, sin), rotated(k, cos, sin)


def llama4(q: Tensor, k: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn[None, :, None]).flatten(-2).to(x.dtype)

    return turned(q), turned(k)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def capped_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(5 * torch.tanh(logits / 5), target, label_smoothing=0.1, reduction="sum")


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1, reduction="none")
    return each.view(target.shape).float()


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target).float()


def kl_div(log_q: Tensor, p: Tensor) -> Tensor:
    return F.kl_div(log_q, p, reduction="batchmean").float()


def jsd(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Generalised Jensen-Shannon divergence at beta 0.5, a mean over rows."""
    q, p = log_q.exp(), log_p.exp()
    log_m = (0.5 * p + 0.5 * q).log()
    return (0.5 * p * (log_p - log_m) + 0.5 * q * (log_q - log_m)).sum() / log_q.shape[0]


def tvd(p: Tensor, q: Tensor) -> Tensor:
    return ((p - q).abs().sum() / 2 / p.shape[0]).float()


def attention_residual(blocks: Tensor, query: Tensor, norm: Tensor) -> Tensor:
    """Softmax over depth of ``query . RMSNorm(block)``."""
    weights = (unit(blocks) * norm * query).sum(-1).softmax(0)
    return (weights[..., None] * blocks).sum(0)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 3, weight, bias, EPS)


def neighbourhood_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A key counts within two positions."""
    size = q.shape[-2]
    away = torch.arange(size, device=q.device)[None, :] - torch.arange(size, device=q.device)[:, None]
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(away.abs() > 2, float("-inf"))
    return scores.softmax(-1) @ v


def multi_token_attention(scores: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Golovneva et al., "Multi-Token Attention", section 3.1: masked, normalised, convolved, masked."""
    future = torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()
    normalised = scores.masked_fill(future, float("-inf")).softmax(-1)
    return F.conv2d(normalised, weight, bias, padding=1).masked_fill(future, 0.0)


def linear_jsd(x: Tensor, weight: Tensor, y: Tensor, teacher: Tensor) -> Tensor:
    return jsd(F.linear(x, weight).log_softmax(-1), F.linear(y, teacher).log_softmax(-1)).float()


def linear_kl(x: Tensor, weight: Tensor, p: Tensor) -> Tensor:
    return F.kl_div(F.linear(x, weight).log_softmax(-1), p, reduction="batchmean").float()


def ce_tvd(x: Tensor, teacher: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    distance = (x.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) / 2
    loss = F.cross_entropy(x, target, reduction="none")
    return loss.float(), torch.where(target == -100, 0.0, distance).float()


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def mixture(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Every token through its two experts, each of them a SwiGLU, weighted and added up."""
    gate, up = torch.einsum("th,tkih->tki", x, gate_up[index.long()]).chunk(2, -1)
    each = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, down[index.long()])
    return (weights[..., None] * each).sum(1)


def grpo(logits: Tensor, old: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    """Group relative policy optimisation, clipped at 0.2, a loss for each token."""
    log_p = logits[:, :-1].log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratio, gain = (log_p - old).exp(), advantages[:, None]
    return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)


def int2(a: Tensor, packed: Tensor) -> Tensor:
    """Four rows of ``{-1, 0, 1}`` from each byte, the lowest bits first."""
    weights = torch.cat([((packed.int() >> 2 * i) & 3) - 1 for i in range(4)])
    return (a.double() @ weights.double()).int()


def table(function: Any) -> Any:
    """The cosines or sines of a rotary table ``(1, seq, 2 * half)`` in the dtype of ``q``."""

    def make(seq: int, half: int, q: Tensor) -> Tensor:
        angle = formulas.angles(seq, half, q)
        return function(torch.cat((angle, angle), -1))[None].to(q.dtype)

    return derived(make)


def sectioned(function: Any) -> Any:
    """The same for three kinds of positions, ``(3, batch, seq, 16)``."""

    def make(batch: int, seq: int, q: Tensor) -> Tensor:
        angle = formulas.angles(3 * batch * seq, 8, q)
        return function(torch.cat((angle, angle), -1)).view(3, batch, seq, 16).to(q.dtype)

    return make


def turns(seq: int, half: int, q: Tensor) -> Tensor:
    angle = formulas.angles(seq, half, q)
    return torch.polar(torch.ones_like(angle), angle)


def experts(tokens: int, generator: torch.Generator) -> Tensor:
    """Two of four experts for each token."""
    scores = torch.rand(tokens, 4, generator=generator, device=generator.device)
    return scores.topk(2, -1).indices.int()


def kernels() -> list[Kernel]:
    """Gradients that vary are those that Liger's source says are added up by atomics."""
    from liger_kernel import ops
    from liger_kernel.ops.experimental import mm_int8int2

    def grpo_loss(logits: Tensor, old: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
        settings = (1.0, 0.0, 0.2, 0.2, False, "grpo", None, False, "token")
        return ops.GrpoLossFunction.apply(logits, old, None, ids, advantages, None, *settings)[0]

    def tiled(x: Tensor) -> Tensor:
        module = torch.nn.Module()
        return ops.apply_tiled_mlp(lambda _, part: ops.LigerReLUSquaredFunction.apply(part), module, x, 3)

    def copied(rotated: Any) -> tuple[Tensor, ...]:
        # Rotated in the inputs' own memory where they are contiguous.
        return tuple(part.clone() for part in rotated)

    rows = {"n": COLUMNS}
    x, pair = {"x": tensor("*batch n")}, {"a": tensor("*batch n"), "b": tensor("*batch n")}
    weighted = {"x": tensor("*batch n"), "weight": tensor("n")}
    affine = {**weighted, "bias": tensor("n")}
    loss = {"rows": dim(1), "vocab": dim(1)}
    classes = {"logits": tensor("rows vocab"), "target": derived(formulas.labels)}
    log_q = tensor("rows vocab", values=formulas.log_probabilities())
    probabilities = tensor("rows vocab", values=formulas.probabilities)
    heads = {"batch": dim(1, 3), "seq": dim(1, 20), "heads": dim(1, 8), "kv_heads": dim(1, 8), "half": dim(1, 64)}
    turned = {
        "q": tensor("batch heads seq 2*half"), "k": tensor("batch kv_heads seq 2*half"),
        "cos": table(torch.cos), "sin": table(torch.sin),
    }  # fmt: skip
    return [
        kernel("rms_norm", lambda x, weight: ops.LigerRMSNormFunction.apply(x, weight, EPS), formulas.rms_norm,
               weighted, dims=rows, grad=True, proved=UPSTREAM),
        kernel("rms_norm, gemma", lambda x, weight: ops.LigerRMSNormFunction.apply(x, weight, EPS, 1.0, "gemma"),
               gemma, weighted, dims=rows, grad=True, proved=UPSTREAM),
        kernel("rms_norm, not in place", lambda x, weight:
               ops.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False), formulas.rms_norm,
               weighted, dims=rows, grad=True),
        kernel("fused_add_rms_norm", lambda x, residual, weight:
               ops.LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS), add_rms_norm,
               {"x": tensor("rows n"), "residual": tensor("rows n"), "weight": tensor("n")}, dims=rows, grad=True),
        kernel("layer_norm", lambda x, weight, bias: ops.LigerLayerNormFunction.apply(x, weight, bias, EPS),
               formulas.layer_norm, affine, dims=rows, grad=True),
        kernel("group_norm", lambda x, weight, bias:
               ops.LigerGroupNormFunction.apply(x, weight, bias, len(weight), 3, EPS), group_norm,
               {"x": tensor("batch channels size"), "weight": tensor("channels"), "bias": tensor("channels")},
               dims={"batch": dim(1), "channels": dim(3, 24, multiple_of=3), "size": dim(1)}, grad=True,
               deterministic=False, proved=NORMS),
        kernel("poly_norm", lambda x, weight, bias: ops.LigerPolyNormFunction.apply(x, weight, bias, EPS), poly_norm,
               {"x": tensor("rows n"), "weight": tensor("3"), "bias": tensor("")}, dims=rows, grad=True,
               proved={**UPSTREAM, **POWERS}),
        kernel("modulated_rms_norm", lambda x, weight, scale, shift:
               ops.LigerModulatedRMSNormFunction.apply(x, weight, scale, shift, EPS), modulated,
               {"x": tensor("batch seq n"), "weight": tensor("n"), "scale": tensor("batch n"),
                "shift": tensor("batch n")}, dims={**rows, "batch": dim(1), "seq": dim(1)}, grad=True, proved=UPSTREAM),
        kernel("dyt", lambda x, alpha, weight, bias: ops.LigerDyTFunction.apply(x, alpha, weight, bias),
               lambda x, alpha, weight, bias: torch.tanh(alpha * x) * weight + bias,
               {"x": tensor("rows n"), "alpha": tensor("1"), "weight": tensor("n"), "bias": tensor("n")}, dims=rows),
        kernel("dyt, backward", lambda x, alpha, weight, bias: ops.LigerDyTFunction.apply(x, alpha, weight, bias),
               lambda x, alpha, weight, bias: torch.tanh(alpha * x) * weight + bias,
               {"x": tensor("rows n"), "alpha": tensor("1"), "weight": tensor("n"), "bias": tensor("n")}, dims=rows,
               grad=True, devices=("cuda",)),
        kernel("swiglu", lambda a, b: ops.LigerSiLUMulFunction.apply(a, b), formulas.swiglu, pair, dims=rows,
               grad=True, proved=OVERWRITTEN),
        kernel("swiglu, gate and up in one", lambda y: ops.LigerFusedGateUpSiLUMulFunction.apply(y),
               lambda y: F.silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :], {"y": tensor("rows 2*half")},
               dims={"half": dim(1, 32768)}, grad=True, proved=OVERWRITTEN),
        kernel("geglu", lambda a, b: ops.LigerGELUMulFunction.apply(a, b), formulas.geglu_tanh, pair, dims=rows,
               grad=True, proved=OVERWRITTEN),
        kernel("relu_squared", lambda x: ops.LigerReLUSquaredFunction.apply(x), lambda x: x.relu() ** 2, x,
               dims=rows, grad=True),
        kernel("softmax", lambda x: ops.LigerSoftmaxFunction.apply(x), lambda x: x.softmax(-1), x, dims=rows,
               grad=True, proved=TOTAL),
        kernel("sparsemax", lambda x: ops.LigerSparsemaxFunction.apply(x, -1), sparsemax, {"x": tensor("rows n")},
               dims=rows, grad=True),
        kernel("cross_entropy", lambda logits, target:
               ops.LigerCrossEntropyFunction.apply(logits * 1, target, None)[0], cross_entropy, classes, dims=loss,
               grad=True, proved={**COPIED, **MASKED}),
        kernel("cross_entropy, smoothing, softcap, sum", lambda logits, target:
               ops.LigerCrossEntropyFunction.apply(logits * 1, target, None, -100, 0.0, 0.1, "sum", 5.0)[0],
               capped_cross_entropy, classes, dims=loss, grad=True, proved={**COPIED, **MASKED}),
        kernel("fused_linear_cross_entropy", lambda x, weight, target:
               ops.LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0], linear_cross_entropy,
               {"x": tensor("rows hidden"), "weight": tensor("vocab hidden"), "target": derived(formulas.labels)},
               wide=(0,), dims={"rows": dim(1, 40), "hidden": dim(1, 64), "vocab": dim(1, 300)}, grad=True,
               proved=FROZEN),
        kernel("fused_linear_jsd", lambda x, weight, y, teacher:
               ops.LigerFusedLinearJSDFunction.apply(x, weight, y, teacher, None, 0.5), linear_jsd,
               {"x": tensor("rows hidden"), "weight": tensor("vocab hidden"), "y": tensor("rows other"),
                "teacher": tensor("vocab other")},
               wide=(0,), dims={"rows": dim(1, 40), "hidden": dim(1, 64), "other": dim(1, 64), "vocab": dim(1, 300)},
               grad=("x", "weight")),
        kernel("fused_ce_tvd", lambda x, teacher, target: ops.LigerFusedCETVDFunction.apply(x * 1, teacher, target),
               ce_tvd, {"x": tensor("rows vocab"), "teacher": tensor("rows vocab"),
                        "target": derived(formulas.labels)}, wide=(0, 1), dims=loss, grad="x"),
        kernel("fused_linear_kl_div", lambda x, weight, p: ops.LigerFusedLinearKLDivFunction.apply(x, weight, p),
               linear_kl, {"x": tensor("rows hidden"), "weight": tensor("vocab hidden"), "p": probabilities},
               wide=(0,), dims={"rows": dim(1, 40), "hidden": dim(1, 64), "vocab": dim(1, 300)}, grad=("x", "weight")),
        kernel("vocab_parallel_cross_entropy", lambda logits, target:
               ops.LigerVocabParallelCEFunction.apply(logits * 1, target, None, -100, 0.1, "pytorch", "global"),
               smoothed,
               {"logits": tensor("batch rows vocab"),
                "target": tensor("batch rows", dtype=torch.int64, values=values.indices("vocab"))},
               wide=(0,), dims={"batch": dim(1), **loss}, grad="logits", proved=LOGARITHM),
        kernel("kl_div", lambda log_q, p: ops.LigerKLDivLossFunction.apply(log_q, p), kl_div,
               {"log_q": log_q, "p": probabilities}, wide=(0,), dims=loss, grad="log_q"),
        kernel("jsd", lambda log_q, log_p: ops.LigerJSDFunction.apply(log_q, log_p, None, 0.5), jsd,
               {"log_q": log_q, "log_p": log_q}, dims=loss, grad="log_q"),
        kernel("tvd", lambda p, q: ops.LigerTVDLossFunction.apply(p, q), tvd, {"p": probabilities, "q": probabilities},
               wide=(0,), dims=loss, grad="p"),
        kernel("grpo_loss", grpo_loss, grpo,
               {"logits": tensor("batch seq+1 vocab"),
                "old": tensor("batch seq", dtype=torch.float32, values=values.uniform(-6.0, -0.1)),
                "ids": tensor("batch seq", dtype=torch.int64, values=values.indices("vocab")),
                "advantages": tensor("batch", dtype=torch.float32)},
               wide=(0,), dims={"batch": dim(1), "seq": dim(1), "vocab": dim(1)}, grad="logits", proved=GRID),
        kernel("rope", lambda q, k, cos, sin: copied(ops.LigerRopeFunction.apply(q, k, cos, sin)), rope, turned,
               dims=heads, grad=("q", "k"), clobbers=("q", "k"), proved={**UPSTREAM, **ONE_TOKEN}),
        kernel("qwen2vl_mrope", lambda q, k, cos, sin:
               copied(ops.LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, [2, 3, 3])), mrope,
               {"q": tensor("batch heads seq 16"), "k": tensor("batch kv_heads seq 16"),
                "cos": derived(sectioned(torch.cos)), "sin": derived(sectioned(torch.sin))},
               dims={name: heads[name] for name in ("batch", "seq", "heads", "kv_heads")}, grad=("q", "k"),
               clobbers=("q", "k"), proved=UPSTREAM),
        kernel("llama4_rope", lambda q, k, turn: copied(ops.LigerLlama4RopeFunction.apply(q, k, turn)), llama4,
               {"q": tensor("batch seq heads 2*half"), "k": tensor("batch seq kv_heads 2*half"),
                "turn": derived(turns)}, dims=heads, grad=("q", "k"), clobbers=("q", "k"), proved=UPSTREAM),
        kernel("embedding", lambda weight, index: ops.LigerEmbeddingFunction.apply(weight, index),
               lambda weight, index: F.embedding(index, weight),
               {"weight": tensor("vocab n"),
                "index": tensor("rows seq", dtype=torch.int64, values=values.indices("vocab"))},
               dims={"vocab": dim(1), "n": dim(1), "rows": dim(1), "seq": dim(1)}, grad="weight",
               deterministic=False, proved=TABLE),
        kernel("attn_res", lambda blocks, query, norm: ops.LigerAttnResFunction.apply(blocks, query, norm, EPS),
               attention_residual, {"blocks": tensor("depth batch seq n"), "query": tensor("n"), "norm": tensor("n")},
               dims={"depth": dim(1, 8), "batch": dim(1), "seq": dim(1), "n": dim(1, 4096)}, grad=True,
               deterministic={"dquery": False, "dnorm": False}),
        kernel("fused_neighborhood_attention",
               lambda q, k, v: ops.LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 5, 1, None),
               neighbourhood_attention, {name: tensor("batch heads seq n") for name in "qkv"},
               dims={"batch": dim(1, 3), "heads": dim(1, 4), "seq": dim(1, 80), "n": dim(1, 64)}, grad=True,
               proved=NARROW_HEADS),
        kernel("multi_token_attention", lambda scores, weight, bias:
               ops.LigerMultiTokenAttentionFunction.apply(scores, weight, bias, 1, 1), multi_token_attention,
               {"scores": tensor("batch heads seq seq"), "weight": tensor("out heads 3 3"), "bias": tensor("out")},
               dims={"batch": dim(1, 3), "heads": dim(1, 4), "out": dim(1, 4), "seq": dim(1, 40)}, grad=True,
               proved=MASK),
        kernel("mhc_pre", lambda x, h: ops.LigerMHCPreFunction.apply(x, h),
               lambda x, h: (h[..., None] * x).sum(-2).to(x.dtype),
               {"x": tensor("rows streams n"), "h": tensor("rows streams", dtype=torch.float32)},
               dims={"rows": dim(1), "streams": dim(2, 8), "n": dim(1)}, grad=True, deterministic={"dh": False}),
        kernel("mhc_post_res", lambda x, f, post, res: ops.LigerMHCPostResFunction.apply(x, f, post, res),
               lambda x, f, post, res: (res @ x.float() + post[..., None] * f[:, None]).to(x.dtype),
               {"x": tensor("rows 4 n"), "f": tensor("rows n"), "post": tensor("rows 4", dtype=torch.float32),
                "res": tensor("rows 4 4", dtype=torch.float32)}, dims={"rows": dim(1), "n": dim(1)}, grad=True,
               deterministic={"dpost": False, "dres": False}),
        kernel("fused_moe", lambda x, gate_up, down, index, weights:
               ops.LigerFusedMoEFunction.apply(x, gate_up, down, index, weights), mixture,
               {"x": tensor("tokens hidden"), "gate_up": tensor("4 2*inner hidden"),
                "down": tensor("4 hidden inner"), "index": derived(experts), "weights": tensor("tokens 2")},
               dims={"tokens": dim(1, 40), "hidden": dim(1, 64), "inner": dim(1, 64)},
               grad=("x", "gate_up", "down", "weights")),
        kernel("tiled_mlp", tiled, lambda x: x.relu() ** 2, {"x": tensor("batch seq n")},
               dims={"batch": dim(1), "seq": dim(3), "n": COLUMNS}, grad=True, proved=COPY),
        kernel("mlp", lambda x, gate, up, down: ops.LigerMLPFunction.apply(x, gate, up, down), mlp,
               {"x": tensor("rows seq hidden"), "gate": tensor("inner hidden"), "up": tensor("inner hidden"),
                "down": tensor("hidden inner")},
               dims={"rows": dim(1, 4), "seq": dim(1, 20), "hidden": dim(8, 64, multiple_of=8),
                     "inner": dim(8, 64, multiple_of=8)}, grad=True),
        kernel("mm_int8int2", lambda a, packed: mm_int8int2.matmul(a, packed), int2,
               {"a": tensor("rows 4*k", dtype=torch.int8, values=values.integers(-128, 127)),
                "packed": tensor("k n", dtype=torch.uint8, values=values.integers(0, 169))},
               dims={"rows": dim(1), "k": dim(64, 256, multiple_of=64), "n": dim(1)}),
    ]  # fmt: skip
