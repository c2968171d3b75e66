"""fla-core (flash-linear-attention), forward and backward."""

# ruff: noqa: PLW0108 - the names of the lambdas' parameters are those of the inputs
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion import derived, dim, tensor, values
from tests.outside.census import formulas
from tests.outside.census.entry import Kernel, kernel
from tests.outside.census.formulas import EPS

CONSTANT = dict.fromkeys(
    ("unexplained", "cast-order"), "fla-core 0.6.0: layer norm of a residual sum that is constant has a gradient"
)
NOT_CAUSAL = {"unexplained": "fla-core 0.6.0: chunks of linear attention pass an infinity back in time"}
OVERWRITTEN = {"mutates-input": "fla-core 0.6.0: backward of two RWKV-7 operations overwrites their input"}


def gated_rms_norm(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    return formulas.rms_norm(x, weight) * F.silu(g)


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Causal and depthwise, over ``(batch, seq, channels)``."""
    width = weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0)).transpose(1, 2)
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]).transpose(1, 2))


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of ``(batch, seq, heads, size)``, every position over those before it and itself, without normalisation."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k).tril() * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores, v)


def gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Yang et al., "Gated Linear Attention", equation 3: one state for each head, decayed by ``exp(g)``."""
    batch, seq, heads, size = k.shape
    state = torch.zeros(batch, heads, size, v.shape[-1], dtype=q.dtype, device=q.device)
    out = []
    for t in range(seq):
        state = state * g[:, t].exp()[..., None] + k[:, t][..., None] * v[:, t][..., None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * size**-0.5, state))
    return torch.stack(out, 1)


def scalar_gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The same with one decay for each head."""
    return gated_linear_attention(q, k, v, g[..., None].expand_as(k))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Yang et al., "Parallelizing Linear Transformers with the Delta Rule", equation 4."""
    batch, seq, heads, size = k.shape
    state = torch.zeros(batch, heads, size, v.shape[-1], dtype=q.dtype, device=q.device)
    out = []
    for t in range(seq):
        held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = beta[:, t][..., None] * (v[:, t] - held)
        state = state + k[:, t][..., None] * change[..., None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * size**-0.5, state))
    return torch.stack(out, 1)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    batch, seq, heads, size = k.shape
    state = torch.zeros(batch, heads, size, v.shape[-1], dtype=q.dtype, device=q.device)
    out = []
    for t in range(seq):
        state = state * g[:, t].exp()[..., None, None]
        held = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = beta[:, t][..., None] * (v[:, t] - held)
        state = state + k[:, t][..., None] * change[..., None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * size**-0.5, state))
    return torch.stack(out, 1)


def hgrn(x: Tensor, g: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = g[:, t].exp() * state + x[:, t]
        out.append(state)
    return torch.stack(out, 1)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, of ``(batch, seq, heads, size)``; several query heads share a head of keys."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    return formulas.attention(q, k, v, causal=True).transpose(1, 2)


def mean_pooling(x: Tensor) -> Tensor:
    """Means of 16 neighbours; the last part may be shorter."""
    return torch.stack([part.mean(1) for part in x.split(16, 1)], 1)


def token_shift(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1)) - x


def channel_mixing(x: Tensor, x_prev: Tensor, x_k: Tensor, key: Tensor, value: Tensor) -> Tensor:
    before = torch.cat((x_prev[:, None], x[:, :-1]), 1)
    return (x + (before - x) * x_k).matmul(key).relu().square().matmul(value)


def linear_cross_entropy(x: Tensor, target: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight, bias), target).float()


def linear_kl(x: Tensor, other: Tensor, weight: Tensor, teacher: Tensor) -> Tensor:
    log_q = F.linear(x, weight).log_softmax(-1)
    return F.kl_div(log_q, F.linear(other, teacher).softmax(-1), reduction="batchmean").float()


def addcmul(x: Tensor, delta: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.addcmul(x, delta, part) for part in (r, w, k, v, a))


def cosines(seq: int, half: int, x: Tensor) -> Tensor:
    return formulas.angles(seq, half, x).cos().to(x.dtype)


def sines(seq: int, half: int, x: Tensor) -> Tensor:
    return formulas.angles(seq, half, x).sin().to(x.dtype)


def decays(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Logarithms of gates between 0 and 1."""
    return F.logsigmoid(torch.randn(shape, generator=generator, device=generator.device)).to(dtype)


def directions(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Vectors of length 1, as the delta rule has keys."""
    return F.normalize(torch.randn(shape, generator=generator, device=generator.device), dim=-1).to(dtype)


def kernels() -> list[Kernel]:
    from fla.modules import activations, fused_cross_entropy, fused_kl_div, fused_linear_cross_entropy
    from fla.modules import rotary as rope
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.modules.norm.l2norm import l2norm
    from fla.modules.norm.layernorm import layer_norm, rms_norm
    from fla.modules.token_shift import token_shift as shift
    from fla.ops.attn.parallel import parallel_attn
    from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
    from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule
    from fla.ops.gla import chunk_gla, fused_recurrent_gla
    from fla.ops.hgrn.chunk import chunk_hgrn
    from fla.ops.hgrn.fused_recurrent import fused_recurrent_hgrn
    from fla.ops.linear_attn.chunk import chunk_linear_attn
    from fla.ops.linear_attn.fused_recurrent import fused_recurrent_linear_attn
    from fla.ops.rwkv7.channel_mixing import channel_mixing_rwkv7
    from fla.ops.rwkv7.fused_addcmul import fused_addcmul_rwkv7
    from fla.ops.simple_gla.chunk import chunk_simple_gla
    from fla.ops.utils.cumsum import chunk_global_cumsum
    from fla.ops.utils.logsumexp import logsumexp_fwd
    from fla.ops.utils.pooling import mean_pooling as pooling
    from fla.ops.utils.softmax import softmax_fwd

    rows, width = {"x": tensor("rows n")}, {"rows": dim(1), "n": dim(1, 8192)}
    pair = {"x": tensor("rows n"), "y": tensor("rows n")}
    weighted = {**rows, "weight": tensor("n")}
    loss = {"rows": dim(1), "vocab": dim(1)}
    small = {"rows": dim(1, 40), "hidden": dim(1, 64), "vocab": dim(1, 300)}
    # States are (key size, value size) and kept whole; a chunk has 64 positions.
    recurrent = {"batch": dim(1, 2), "seq": dim(1, 80), "heads": dim(1, 3), "size": dim(1, 64), "out": dim(1, 64)}
    chunked = {**recurrent, "size": dim(16, 64, multiple_of=16), "out": dim(16, 64, multiple_of=16)}
    qkv = {"q": tensor("batch seq heads size"), "k": tensor("batch seq heads size"), "v": tensor("batch seq heads out")}
    unit_keys = {**qkv, "k": tensor("batch seq heads size", values=directions)}
    gates = tensor("batch seq heads size", values=decays)
    one_gate = tensor("batch seq heads", values=decays)
    beta = tensor("batch seq heads", values=values.uniform(0.0, 1.0))
    return [
        kernel("rms_norm", lambda x, weight: rms_norm(x, weight, None, eps=EPS), formulas.rms_norm, weighted,
               dims=width, grad=True),
        kernel("layer_norm", lambda x, weight, bias: layer_norm(x, weight, bias, eps=EPS), formulas.layer_norm,
               {**weighted, "bias": tensor("n")}, dims=width, grad=True),
        kernel("layer_norm, residual", lambda x, residual, weight, bias:
               layer_norm(x, weight, bias, residual=residual, eps=EPS, prenorm=True), formulas.residual_layer_norm,
               {"x": tensor("rows n"), "residual": tensor("rows n"), "weight": tensor("n"), "bias": tensor("n")},
               dims=width, grad=True, proved=CONSTANT),
        kernel("rms_norm_gated", lambda x, g, weight: rms_norm_gated(x, g, weight, None, eps=EPS), gated_rms_norm,
               {"x": tensor("rows n"), "g": tensor("rows n"), "weight": tensor("n")}, dims=width, grad=True),
        kernel("l2norm", lambda x: l2norm(x, eps=EPS),
               lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS), rows, dims=width, grad=True),
        kernel("swish", lambda x: activations.swish(x), lambda x: F.silu(x), rows, dims=width, grad=True),
        kernel("sigmoid", lambda x: activations.sigmoid(x), lambda x: x.sigmoid(), rows, dims=width, grad=True),
        kernel("logsigmoid", lambda x: activations.logsigmoid(x), lambda x: F.logsigmoid(x), rows, dims=width,
               grad=True),
        kernel("swiglu", lambda x, y: activations.swiglu(x, y), lambda x, y: F.silu(x) * y, pair, dims=width,
               grad=True),
        kernel("rotary", lambda x, cos, sin: rope.rotary_embedding(x, cos, sin), formulas.rotary,
               {"x": tensor("batch seq heads 2*half"), "cos": derived(cosines), "sin": derived(sines)},
               dims={"batch": dim(1, 3), "seq": dim(1), "heads": dim(1, 8), "half": dim(1, 128)}, grad="x"),
        kernel("cross_entropy", lambda logits, target: fused_cross_entropy.ops.cross_entropy_loss(logits, target)[0],
               lambda logits, target: F.cross_entropy(logits, target, reduction="none").float(),
               {"logits": tensor("rows vocab"), "target": derived(formulas.labels)}, wide=(0,), dims=loss, grad=True),
        kernel("fused_linear_cross_entropy", lambda x, target, weight, bias:
               fused_linear_cross_entropy.ops.fused_linear_cross_entropy_loss(x, target, weight, bias),
               linear_cross_entropy,
               {"x": tensor("rows hidden"), "target": derived(formulas.labels), "weight": tensor("vocab hidden"),
                "bias": tensor("vocab")}, wide=(0,), dims=small, grad=True),
        kernel("fused_kl_div", lambda x, other, weight, teacher:
               fused_kl_div.ops.fused_kl_div_loss(x, other, weight, teacher), linear_kl,
               {"x": tensor("rows hidden"), "other": tensor("rows hidden"), "weight": tensor("vocab hidden"),
                "teacher": tensor("vocab hidden")}, wide=(0,), dims=small, grad=("x", "weight")),
        kernel("token_shift", lambda x: shift(x), token_shift, {"x": tensor("batch seq n")},
               dims={"batch": dim(1), "seq": dim(1), "n": dim(1, 4096)}, grad=True),
        kernel("causal_conv1d", lambda x, weight, bias: causal_conv1d(x, weight, bias, activation="silu")[0],
               short_convolution, {"x": tensor("batch seq n"), "weight": tensor("n 4"), "bias": tensor("n")},
               dims={"batch": dim(1, 3), "seq": dim(1, 200), "n": dim(1, 200)}, grad=True),
        kernel("fused_recurrent_linear_attn", lambda q, k, v: fused_recurrent_linear_attn(q, k, v)[0],
               linear_attention, qkv, dims=recurrent, grad=True),
        kernel("chunk_linear_attn", lambda q, k, v: chunk_linear_attn(q, k, v, normalize=False)[0], linear_attention,
               qkv, dims=chunked, grad=True),
        kernel("fused_recurrent_gla", lambda q, k, v, g: fused_recurrent_gla(q, k, v, gk=g)[0],
               gated_linear_attention, {**qkv, "g": gates}, dims=recurrent, grad=True),
        kernel("chunk_gla", lambda q, k, v, g: chunk_gla(q, k, v, g)[0], gated_linear_attention, {**qkv, "g": gates},
               dims=chunked, grad=True, proved=NOT_CAUSAL),
        kernel("chunk_simple_gla", lambda q, k, v, g: chunk_simple_gla(q, k, v, g)[0], scalar_gated,
               {**qkv, "g": one_gate}, dims=chunked, grad=True, proved=NOT_CAUSAL),
        kernel("fused_recurrent_delta_rule", lambda q, k, v, beta: fused_recurrent_delta_rule(q, k, v, beta)[0],
               delta_rule, {**unit_keys, "beta": beta}, dims=recurrent, grad=True),
        kernel("chunk_delta_rule", lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta)[0], delta_rule,
               {**unit_keys, "beta": beta}, dims=chunked, dtypes=(torch.float16, torch.bfloat16), grad=True),
        kernel("fused_recurrent_gated_delta_rule", lambda q, k, v, g, beta:
               fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta)[0], gated_delta_rule,
               {**unit_keys, "g": one_gate, "beta": beta}, dims=recurrent),
        kernel("fused_recurrent_hgrn", lambda x, g: fused_recurrent_hgrn(x, g)[0], hgrn,
               {"x": tensor("batch seq n"), "g": tensor("batch seq n", values=decays)},
               dims={"batch": dim(1, 3), "seq": dim(1, 80), "n": dim(1, 200)}, grad=True),
        kernel("chunk_hgrn", lambda x, g: chunk_hgrn(x, g)[0], hgrn,
               {"x": tensor("batch seq n"), "g": tensor("batch seq n", values=decays)},
               dims={"batch": dim(1, 3), "seq": dim(1, 200), "n": dim(1, 200)}, grad=True),
        kernel("parallel_attn", lambda q, k, v: parallel_attn(q, k, v), grouped_attention,
               {"q": tensor("batch seq heads size"), "k": tensor("batch seq kv_heads size"),
                "v": tensor("batch seq kv_heads size")},
               dims={"batch": dim(1, 2), "seq": dim(1, 150), "kv_heads": dim(1, 2),
                     "heads": dim(1, 4, multiple_of="kv_heads"), "size": dim(16, 64, multiple_of=16)}, grad=True),
        kernel("mean_pooling", lambda x: pooling(x, 16), mean_pooling, {"x": tensor("batch seq heads size")},
               dims={"batch": dim(1, 3), "seq": dim(1, 200), "heads": dim(1, 4), "size": dim(1, 64)}, grad=True),
        kernel("chunk_global_cumsum", lambda x: chunk_global_cumsum(x), lambda x: x.float().cumsum(1),
               {"x": tensor("batch seq heads")}, wide=(0,),
               dims={"batch": dim(1, 3), "seq": dim(1), "heads": dim(1, 8)}),
        kernel("softmax_fwd", lambda x: softmax_fwd(x), lambda x: x.float().softmax(-1), rows, wide=(0,), dims=width),
        kernel("logsumexp_fwd", lambda x: logsumexp_fwd(x), lambda x: x.float().logsumexp(-1), rows, wide=(0,),
               dims=width),
        kernel("rwkv7, channel_mixing", lambda x, x_prev, x_k, key, value:
               channel_mixing_rwkv7(x, x_prev, x_k, key, value)[0], channel_mixing,
               {"x": tensor("batch seq n"), "x_prev": tensor("batch n"), "x_k": tensor("n"),
                "key": tensor("n inner"), "value": tensor("inner n")},
               dims={"batch": dim(1, 3), "seq": dim(1, 40), "n": dim(1, 64), "inner": dim(1, 64)}, grad=True,
               proved=OVERWRITTEN),
        kernel("rwkv7, fused_addcmul", lambda x, delta, r, w, k, v, a:
               fused_addcmul_rwkv7(x, delta, r, w, k, v, a, None)[:5], addcmul,
               {"x": tensor("batch seq n"), "delta": tensor("batch seq n"),
                **{name: tensor("1 1 n") for name in ("r", "w", "k", "v", "a")}},
               dims={"batch": dim(1, 3), "seq": dim(1, 40), "n": dim(1, 200)}, grad=True, proved=OVERWRITTEN),
    ]  # fmt: skip
