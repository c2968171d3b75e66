"""Every operation of ``liger_kernel.ops``, forward and backward, against its formula in float64.

The formulas are those of the operations' docstrings and papers, not of Liger's code. Where an operation rounds to the
input's dtype half way, so that a few more roundings are right, ``slack`` says how many.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.outside.survey.model import Draw, Op, Package

EPS = 1e-6

FLATTENED = (
    "A real bug of Liger 0.8.5: swiglu_fused_gate_up_backward() documents [..., 2 * ffn_size], flattens to two "
    "dimensions and returns the gradient so; for an input of three PyTorch refuses it: 'returned an invalid gradient "
    "at index 0 - got [10, 66] but expected shape compatible with [2, 5, 66]'."
)
NO_CPU = (
    "the launcher asks which accelerator there is (cuda, xpu or npu, by torch.cuda.is_available()) to size its grid, "
    "and has no answer for none: NUM_SMS stays unbound"
)


def unit(x: Tensor) -> Tensor:
    """``x`` divided by the root of its mean square along the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def angles(*positions: int, half: int) -> Tensor:
    """Rotary angles ``(*positions, 2 * half)``, both halves equal, every row another."""
    position = torch.arange(math.prod(positions)).reshape(*positions, 1)
    angle = position * 100.0 ** (-torch.arange(half) / half)
    return torch.cat((angle, angle), -1)


def labels(draw: Draw, rows: int, vocab: int) -> Tensor:
    """Classes; the second row is to be ignored."""
    found = draw.integers(0, vocab, rows)
    found[1] = -100
    return found


def distribution(draw: Draw, rows: int, vocab: int, *, log: bool = False) -> Tensor:
    logits = torch.randn(rows, vocab, generator=draw.generator)
    return (logits.log_softmax(-1) if log else logits.softmax(-1)).to(draw.dtype)


def counted(rows: Tensor, target: Tensor | None) -> Tensor:
    """The sum of the rows whose label counts, divided by how many they are."""
    if target is None:
        return rows.sum() / rows.shape[0]
    return rows[target != -100].sum() / (target != -100).sum()


def jsd(log_q: Tensor, log_p: Tensor, target: Tensor | None, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of Q, the student, from P; KL(P || Q) at 0 and KL(Q || P) at 1."""
    q, p = log_q.exp(), log_p.exp()
    if beta == 0.0:
        each = p * (log_p - log_q)
    elif beta == 1.0:
        each = q * (log_q - log_p)
    else:
        log_m = (beta * p + (1 - beta) * q).log()
        each = beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)
    return counted(each.sum(-1), target)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 3, weight, bias, EPS)


def sparsemax(x: Tensor) -> Tensor:
    """Martins and Astudillo, "From Softmax to Sparsemax", ICML 2016, equations 4 to 6."""
    ordered = x.sort(-1, descending=True).values
    ranks = torch.arange(1, x.shape[-1] + 1)
    size = (1 + ranks * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
    threshold = (ordered.cumsum(-1).gather(-1, size - 1) - 1) / size
    return (x - threshold).clamp(min=0)


def causal(scores: Tensor, filler: float) -> Tensor:
    size = scores.shape[-1]
    return scores.masked_fill(torch.ones(size, size).triu(1).bool(), filler)


def multi_token_attention(scores: Tensor, weight: Tensor, bias: Tensor, *, sparse: bool) -> Tensor:
    """Golovneva et al., "Multi-Token Attention", section 3.1: masked, normalised, convolved, masked."""
    masked = causal(scores, -1e9)
    normalised = sparsemax(masked) if sparse else masked.softmax(-1)
    return causal(F.conv2d(normalised, weight, bias, padding=1), 0.0)


def neighbourhood_attention(q: Tensor, k: Tensor, v: Tensor, kernel: int, dilation: int) -> Tensor:
    """A key counts within ``kernel // 2 * dilation`` positions, at multiples of ``dilation``."""
    size = q.shape[-2]
    away = torch.arange(size)[None, :] - torch.arange(size)[:, None]
    near = (away.abs() <= kernel // 2 * dilation) & (away % dilation == 0)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~near, float("-inf"))
    return scores.softmax(-1) @ v


def attention_residual(blocks: Tensor, query: Tensor, norm: Tensor) -> Tensor:
    """Softmax over depth of ``query . RMSNorm(block)``."""
    weights = (unit(blocks) * norm * query).sum(-1).softmax(0)
    return (weights[..., None] * blocks).sum(0)


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight[0] * unit(x**3) + weight[1] * unit(x**2) + weight[2] * unit(x) + bias


def modulated(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (1 + scale[:, None]) * (unit(x) * weight) + shift[:, None]


def mixture(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Every token through its top-k experts, each of them a SwiGLU, weighted and added up."""
    gate, up = torch.einsum("th,tkih->tki", x, gate_up[index.long()]).chunk(2, -1)
    each = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, down[index.long()])
    return (weights[..., None] * each).sum(1)


def coefficients(x: Tensor, phi: Tensor, bias: Tensor, *alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Manifold-constrained hyper-connections (arXiv:2512.24880), equations 7 to 9, four Sinkhorn rounds."""
    streams = x.shape[-2]
    mixed = unit(x.flatten(-2)) @ phi
    pre, post, rest = mixed.split([streams, streams, streams * streams], -1)
    bias_pre, bias_post, bias_rest = bias.split([streams, streams, streams * streams])
    matrix = (rest * alpha[2] + bias_rest).unflatten(-1, (streams, streams)).softmax(-1) + EPS
    matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
    for _ in range(3):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + EPS)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
    return (pre * alpha[0] + bias_pre).sigmoid(), 2 * (post * alpha[1] + bias_post).sigmoid(), matrix


def grpo(
    logits: Tensor, old: Tensor, ref: Tensor, ids: Tensor, advantages: Tensor, mask: Tensor, *, kind: str
) -> tuple[Tensor, Tensor]:
    """Group relative policy optimisation, clipped at 0.2 and 0.4, KL weight 0.04, temperature 0.9.

    The loss, and the mean KL divergence, through which no gradient flows.
    """
    log_p = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    gain = advantages[:, None]
    if kind == "sequence":
        mean = ((log_p - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        ratio = mean.exp().expand_as(log_p)
    else:
        ratio = (log_p - old).exp()
    if kind == "cispo":
        loss = -ratio.detach().clamp(max=0.4) * gain * log_p
    elif kind == "sapo":
        sharp = torch.where(gain > 0, 1.0, 1.05)
        loss = -(sharp * (ratio - 1)).sigmoid() * 4 / sharp * gain
    else:
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.4) * gain)
    divergence = (ref - log_p).exp() - (ref - log_p) - 1
    loss = loss + 0.04 * divergence
    if kind == "cispo":
        total = (loss * mask).sum() / mask.sum()
    else:
        total = ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    return total, (divergence.detach() * mask).sum() / mask.sum()


def int2_weights(packed: Tensor) -> Tensor:
    """Four rows of ``{-1, 0, 1}`` from each byte, the lowest bits first."""
    return torch.cat([((packed.int() >> 2 * i) & 3) - 1 for i in range(4)])


def ops() -> list[Op]:  # noqa: C901 - as in conch
    """Needs Liger, and a mended Triton imported before it."""
    from liger_kernel import ops as liger
    from liger_kernel.ops.experimental import mm_int8int2
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    def fused_linear_inputs(d: Draw) -> list[Any]:
        return [d.normal(7, 19), d.normal(37, 19, scale=0.3), labels(d, 7, 37)]

    def rope_inputs(d: Draw) -> list[Any]:
        # (batch, seq, heads, size) is contiguous, as a model's projection leaves it, and then rotated where it lies.
        turn = angles(6, half=8)[None]
        q, k = d.normal(2, 6, 3, 16).transpose(1, 2), d.normal(2, 6, 1, 16).transpose(1, 2)
        return [q, k, turn.cos().to(d.dtype), turn.sin().to(d.dtype)]

    def mrope_inputs(d: Draw) -> list[Any]:
        turn = angles(3, 2, 5, half=8)
        q, k = d.normal(2, 5, 3, 16).transpose(1, 2), d.normal(2, 5, 1, 16).transpose(1, 2)
        return [q, k, turn.cos().to(d.dtype), turn.sin().to(d.dtype)]

    def mrope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        sections = (2, 3, 3, 2, 3, 3)  # temporal, height, width, in both halves
        cos, sin = (
            torch.cat([part[i % 3] for i, part in enumerate(table.split(sections, -1))], -1)[:, None]
            for table in (cos, sin)
        )
        return rotate_half(q, cos, sin), rotate_half(k, cos, sin)

    def llama4_inputs(d: Draw) -> list[Any]:
        turn = angles(5, half=8)[:, :8]
        return [d.normal(2, 5, 3, 16), d.normal(2, 5, 1, 16), torch.polar(torch.ones_like(turn), turn)]

    def llama4(q: Tensor, k: Tensor, turn: Tensor) -> list[Tensor]:
        turn = turn.to(torch.complex128)[None, :, None]
        pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
        return [torch.view_as_real(pair * turn).flatten(-2) for pair in pairs]

    def mhc_inputs(d: Draw) -> list[Any]:
        ones = torch.ones(())
        return [
            d.normal(5, 4, 33),
            d.normal(132, 24, scale=0.1),
            torch.randn(24, generator=d.generator),
            ones * 0.9,
            ones * 1.1,
            ones * 0.7,
        ]

    def moe_inputs(d: Draw) -> list[Any]:
        index = torch.stack([d.permutation(4)[:2] for _ in range(9)]).int()
        weights = d.uniform(9, 2, low=0.2)
        return [d.normal(9, 33), d.normal(4, 42, 33, scale=0.2), d.normal(4, 33, 21, scale=0.2), index, weights]

    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def mlp_inputs(d: Draw) -> list[Any]:
        # Multiples of eight elements: the descriptors of Hopper's TMA, which it loads with, ask for 16 bytes.
        return [d.normal(2, 5, 24), d.normal(40, 24, scale=0.2), d.normal(40, 24, scale=0.2), d.normal(24, 40)]

    def tiled(x: Tensor) -> Tensor:
        module = torch.nn.Module()
        return liger.apply_tiled_mlp(lambda _, part: liger.LigerReLUSquaredFunction.apply(part), module, x, 3)

    def grpo_inputs(d: Draw) -> list[Any]:
        mask = torch.ones(2, 5)
        mask[1, 3:] = 0
        near = torch.full((2, 5), -3.6) + torch.randn(2, 5, generator=d.generator) * 0.4
        ids = d.integers(0, 37, 2, 5)
        return [d.normal(2, 6, 37), near, near + 0.1, ids, torch.tensor([1.3, -0.7]), mask]

    def grpo_op(name: str, kind: str, level: str) -> Op:
        def run(*x: Any) -> tuple[Tensor, ...]:
            high = 0.4
            settings = (0.9, 0.04, 0.2, high, False, kind, None, True, level)
            loss, divergence, _ = liger.GrpoLossFunction.apply(*x, *settings)
            return loss, divergence.detach()

        formula = partial(grpo, kind="sequence" if level == "sequence" else kind)
        return Op(name, grpo_inputs, run, formula, (0,), covers=("GrpoLossFunction",))

    def ce(x: Tensor, target: Tensor, **settings: Any) -> Tensor:
        return F.cross_entropy(x, target, **settings)

    def kl_inputs(d: Draw, *, log: bool) -> list[Any]:
        return [distribution(d, 5, 37, log=True), distribution(d, 5, 37, log=log)]

    def jsd_inputs(d: Draw) -> list[Any]:
        return [distribution(d, 5, 37, log=True), distribution(d, 5, 37, log=True), labels(d, 5, 37)]

    def linear_jsd_inputs(d: Draw) -> list[Any]:
        student, teacher = d.normal(7, 19), d.normal(7, 23)
        return [student, d.normal(37, 19, scale=0.3), teacher, d.normal(37, 23, scale=0.3), labels(d, 7, 37)]

    def linear_jsd(x: Tensor, w: Tensor, y: Tensor, v: Tensor, target: Tensor) -> Tensor:
        return jsd(F.linear(x, w).log_softmax(-1), F.linear(y, v).log_softmax(-1), target, 0.3)

    def linear_kl(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
        return F.kl_div(F.linear(x, w).log_softmax(-1), p, reduction="batchmean")

    def ce_tvd(x: Tensor, teacher: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        distance = (x.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) / 2
        return F.cross_entropy(x, target, reduction="none"), torch.where(target == -100, 0.0, distance)

    def tvd(p: Tensor, q: Tensor, target: Tensor) -> Tensor:
        return counted((p - q).abs().sum(-1) / 2, target)

    def scaled_ce(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), target, reduction="none")

    def sinking(function: Any) -> Any:
        """The losses write the gradient over their first input, which a leaf does not allow."""
        return lambda x, *rest: function(x * 1, *rest)

    def rows(*shapes: tuple[int, ...]) -> Any:
        return lambda d: [d.normal(*shape) for shape in shapes]

    rms = "LigerRMSNormFunction"
    return [
        Op("attn_res", rows((3, 2, 5, 33), (33,), (33,)),
           lambda *x: liger.LigerAttnResFunction.apply(*x, EPS), attention_residual, (0, 1, 2),
           covers=("LigerAttnResFunction",)),
        Op("cross_entropy", lambda d: [d.normal(7, 37), labels(d, 7, 37)],
           sinking(lambda x, y: liger.LigerCrossEntropyFunction.apply(x, y, None)[0]), ce, (0,),
           covers=("LigerCrossEntropyFunction",)),
        Op("cross_entropy, class weights, smoothing, softcap",
           lambda d: [d.normal(7, 37, scale=3), labels(d, 7, 37), d.uniform(37, low=0.5).float()],
           sinking(lambda x, y, w: liger.LigerCrossEntropyFunction.apply(x, y, w, -100, 0.0, 0.1, "sum", 5.0)[0]),
           lambda x, y, w: ce(5 * torch.tanh(x / 5), y, weight=w, label_smoothing=0.1, reduction="sum"), (0,),
           covers=("LigerCrossEntropyFunction",)),
        Op("dyt, forward", rows((2, 5, 33), (1,), (33,), (33,)), liger.LigerDyTFunction.apply,
           lambda x, a, g, b: torch.tanh(a * x) * g + b, covers=("LigerDyTFunction",)),
        Op("dyt, backward", rows((2, 5, 33), (1,), (33,), (33,)), liger.LigerDyTFunction.apply,
           lambda x, a, g, b: torch.tanh(a * x) * g + b, (0, 1, 2, 3), covers=("LigerDyTFunction",),
           absent={"all": NO_CPU}),
        Op("embedding", lambda d: [d.normal(37, 19), d.integers(0, 37, 3, 5)], liger.LigerEmbeddingFunction.apply,
           lambda w, i: w[i], (0,), covers=("LigerEmbeddingFunction",)),
        Op("fused_add_rms_norm", rows((5, 33), (5, 33), (33,)),
           lambda *x: liger.LigerFusedAddRMSNormFunction.apply(*x, EPS),
           lambda x, r, w: (unit(x + r) * w, x + r), (0, 1, 2), covers=("LigerFusedAddRMSNormFunction",)),
        Op("fused_ce_tvd", lambda d: [d.normal(7, 37), d.normal(7, 37), labels(d, 7, 37)],
           sinking(liger.LigerFusedCETVDFunction.apply), ce_tvd, (0,), covers=("LigerFusedCETVDFunction",)),
        Op("fused_linear_cross_entropy", fused_linear_inputs,
           lambda x, w, y: liger.LigerFusedLinearCrossEntropyFunction.apply(x, w, y)[0],
           lambda x, w, y: ce(F.linear(x, w), y), (0, 1), covers=("LigerFusedLinearCrossEntropyFunction",)),
        Op("fused_linear_jsd", linear_jsd_inputs,
           lambda *x: liger.LigerFusedLinearJSDFunction.apply(*x, 0.3), linear_jsd, (0, 1), slack=2.0,
           covers=("LigerFusedLinearJSDFunction",)),
        Op("fused_linear_kl_div", lambda d: [d.normal(7, 19), d.normal(37, 19, scale=0.3), distribution(d, 7, 37)],
           liger.LigerFusedLinearKLDivFunction.apply, linear_kl, (0, 1), covers=("LigerFusedLinearKLDivFunction",)),
        Op("fused_linear_scaled_cross_entropy", fused_linear_inputs,
           LigerFusedLinearScaledCrossEntropyFunction.apply, scaled_ce, (0, 1),
           covers=("LigerFusedLinearScaledCrossEntropyFunction",),
           absent={"all": "no Triton in it: CuTe DSL for sm_90 and later, plain PyTorch elsewhere"}),
        Op("fused_linear_scaled_cross_entropy, tensor-parallel", fused_linear_inputs,
           liger.LigerFusedLinearScaledCrossEntropyTPFunction.apply, scaled_ce, (0, 1),
           covers=("LigerFusedLinearScaledCrossEntropyTPFunction",),
           absent={"all": "no Triton in it: CUTLASS with NVSHMEM, or plain PyTorch with torch.distributed"}),
        Op("fused_moe", moe_inputs, liger.LigerFusedMoEFunction.apply, mixture, (0, 1, 2, 4), slack=2.0,
           covers=("LigerFusedMoEFunction",)),
        Op("fused_neighborhood_attention", rows((2, 3, 21, 16), (2, 3, 21, 16), (2, 3, 21, 16)),
           lambda q, k, v: liger.LigerFusedNeighborhoodAttentionFunction.apply(q, k, v, 5, 2, None),
           lambda q, k, v: neighbourhood_attention(q, k, v, 5, 2), (0, 1, 2),
           covers=("LigerFusedNeighborhoodAttentionFunction",)),
        Op("geglu", rows((5, 33), (5, 33)), liger.LigerGELUMulFunction.apply,
           lambda a, b: F.gelu(a, approximate="tanh") * b, (0, 1), covers=("LigerGELUMulFunction",)),
        Op("group_norm", rows((3, 6, 5, 7), (6,), (6,)),
           lambda *x: liger.LigerGroupNormFunction.apply(*x, 6, 3, EPS), group_norm, (0, 1, 2), slack=3.0,
           covers=("LigerGroupNormFunction",)),
        grpo_op("grpo_loss", "grpo", "token"),
        grpo_op("grpo_loss, sequence", "grpo", "sequence"),
        grpo_op("grpo_loss, cispo", "cispo", "token"),
        grpo_op("grpo_loss, sapo", "sapo", "token"),
        Op("jsd", jsd_inputs, lambda x, p, y: liger.LigerJSDFunction.apply(x, p, y, 0.3),
           lambda x, p, y: jsd(x, p, y, 0.3), (0,), covers=("LigerJSDFunction",)),
        Op("jsd, forward KL", jsd_inputs, lambda x, p, y: liger.LigerJSDFunction.apply(x, p, y, 0.0),
           lambda x, p, y: jsd(x, p, y, 0.0), (0,), covers=("LigerJSDFunction",)),
        Op("jsd, reverse KL", jsd_inputs, lambda x, p, y: liger.LigerJSDFunction.apply(x, p, y, 1.0),
           lambda x, p, y: jsd(x, p, y, 1.0), (0,), covers=("LigerJSDFunction",)),
        Op("kl_div", partial(kl_inputs, log=False), liger.LigerKLDivLossFunction.apply,
           lambda x, p: F.kl_div(x, p, reduction="batchmean"), (0,), covers=("LigerKLDivLossFunction",)),
        Op("kl_div, log target, unreduced", partial(kl_inputs, log=True),
           lambda x, p: liger.LigerKLDivLossFunction.apply(x, p, "none", True),
           lambda x, p: F.kl_div(x, p, reduction="none", log_target=True), (0,), covers=("LigerKLDivLossFunction",)),
        Op("layer_norm", rows((2, 5, 33), (33,), (33,)), lambda *x: liger.LigerLayerNormFunction.apply(*x, EPS),
           lambda x, w, b: F.layer_norm(x, (33,), w, b, EPS), (0, 1, 2), covers=("LigerLayerNormFunction",)),
        Op("llama4_rope", llama4_inputs, liger.LigerLlama4RopeFunction.apply, llama4, (0, 1),
           covers=("LigerLlama4RopeFunction",)),
        Op("mhc_coeffs", mhc_inputs,
           lambda *x: liger.LigerMHCCoeffsFunction.apply(*x, True, 4, EPS, 0.0, EPS, 2.0), coefficients,
           (0, 1, 2, 3, 4, 5), slack=2.0, covers=("LigerMHCCoeffsFunction",)),
        Op("mhc_post_res", rows((5, 4, 33), (5, 33), (5, 4), (5, 4, 4)), liger.LigerMHCPostResFunction.apply,
           lambda x, f, p, r: r @ x + p[..., None] * f[:, None], (0, 1, 2, 3), covers=("LigerMHCPostResFunction",)),
        Op("mhc_pre", rows((5, 4, 33), (5, 4)), liger.LigerMHCPreFunction.apply,
           lambda x, h: (h[..., None] * x).sum(-2), (0, 1), covers=("LigerMHCPreFunction",)),
        Op("mlp", mlp_inputs, liger.LigerMLPFunction.apply, mlp, (0, 1, 2, 3), slack=2.0,
           covers=("LigerMLPFunction",)),
        Op("mm_int8int2",
           lambda d: [d.integers(-128, 128, 5, 256, dtype=torch.int8), d.integers(0, 170, 64, 21, dtype=torch.uint8)],
           mm_int8int2.matmul, lambda a, b: (a.int() @ int2_weights(b)).int(), dtypes=(torch.float32,),
           covers=("mm_int8int2.matmul",)),
        Op("modulated_rms_norm", rows((2, 5, 33), (33,), (2, 33), (2, 33)),
           lambda *x: liger.LigerModulatedRMSNormFunction.apply(*x, EPS), modulated, (0, 1, 2, 3),
           covers=("LigerModulatedRMSNormFunction",)),
        Op("multi_token_attention", rows((2, 3, 9, 9), (4, 3, 3, 3), (4,)),
           lambda s, w, b: liger.LigerMultiTokenAttentionFunction.apply(s, w, b, 1, 1),
           partial(multi_token_attention, sparse=False), (0, 1, 2), covers=("LigerMultiTokenAttentionFunction",)),
        Op("multi_token_attention, sparse", rows((2, 3, 9, 9), (4, 3, 3, 3), (4,)),
           lambda s, w, b: liger.LigerMultiTokenAttentionFunction.apply(s, w, b, 1, 1, 1, 1, True),
           partial(multi_token_attention, sparse=True), (0, 1, 2), dtypes=(torch.float32,),
           covers=("LigerMultiTokenAttentionFunction",)),
        Op("poly_norm", rows((5, 33), (3,), ()), lambda *x: liger.LigerPolyNormFunction.apply(*x, EPS), poly_norm,
           (0, 1, 2), slack=3.0, covers=("LigerPolyNormFunction",)),
        Op("qwen2vl_mrope", mrope_inputs,
           lambda *x: liger.LigerQwen2VLMRopeFunction.apply(*x, [2, 3, 3]), mrope, (0, 1),
           covers=("LigerQwen2VLMRopeFunction",)),
        Op("relu_squared", rows((5, 33)), liger.LigerReLUSquaredFunction.apply, lambda x: x.relu() ** 2, (0,),
           covers=("LigerReLUSquaredFunction",)),
        Op("rms_norm", rows((2, 5, 33), (33,)), lambda x, w: liger.LigerRMSNormFunction.apply(x, w, EPS),
           lambda x, w: unit(x) * w, (0, 1), covers=(rms,)),
        Op("rms_norm, gemma", rows((2, 5, 33), (33,)),
           lambda x, w: liger.LigerRMSNormFunction.apply(x, w, EPS, 1.0, "gemma"),
           lambda x, w: unit(x) * (1 + w), (0, 1), covers=(rms,)),
        Op("rms_norm, block of rows", rows((300, 33), (33,)),
           lambda x, w: liger.LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", True, False),
           lambda x, w: unit(x) * w, (0, 1), covers=(rms,)),
        Op("rope", rope_inputs, liger.LigerRopeFunction.apply,
           lambda q, k, c, s: (rotate_half(q, c[:, None], s[:, None]), rotate_half(k, c[:, None], s[:, None])), (0, 1),
           covers=("LigerRopeFunction",)),
        Op("softmax", rows((2, 5, 33)), liger.LigerSoftmaxFunction.apply, lambda x: x.softmax(-1), (0,),
           covers=("LigerSoftmaxFunction",)),
        Op("sparsemax", rows((5, 33)), lambda x: liger.LigerSparsemaxFunction.apply(x, -1), sparsemax, (0,),
           covers=("LigerSparsemaxFunction",)),
        Op("swiglu", rows((2, 5, 33), (2, 5, 33)), liger.LigerSiLUMulFunction.apply, lambda a, b: F.silu(a) * b,
           (0, 1), covers=("LigerSiLUMulFunction",)),
        Op("swiglu, gate and up in one", rows((10, 66)), liger.LigerFusedGateUpSiLUMulFunction.apply,
           lambda y: F.silu(y[..., :33]) * y[..., 33:], (0,), covers=("LigerFusedGateUpSiLUMulFunction",)),
        Op("swiglu, gate and up in one, 3-d", rows((2, 5, 66)), liger.LigerFusedGateUpSiLUMulFunction.apply,
           lambda y: F.silu(y[..., :33]) * y[..., 33:], (0,), covers=("LigerFusedGateUpSiLUMulFunction",),
           bugs=dict.fromkeys(("float32", "float16", "bfloat16"), FLATTENED)),
        Op("tiled_mlp", rows((2, 7, 33)), tiled, lambda x: x.relu() ** 2, (0,), covers=("LigerTiledMLPFunction",)),
        Op("tvd", lambda d: [distribution(d, 5, 37), distribution(d, 5, 37), labels(d, 5, 37)],
           liger.LigerTVDLossFunction.apply, tvd, (0,), covers=("LigerTVDLossFunction",)),
        Op("vocab_parallel_cross_entropy", lambda d: [d.normal(3, 2, 37), d.integers(0, 37, 3, 2)],
           lambda x, y: liger.LigerVocabParallelCEFunction.apply(x, y, None, -100, 0.1, "pytorch", "global"),
           lambda x, y: ce(x.flatten(0, 1), y.flatten(), label_smoothing=0.1, reduction="none").view(3, 2), (0,),
           covers=("LigerVocabParallelCEFunction",)),
    ]  # fmt: skip


def public() -> list[str]:
    """The public functions of ``liger_kernel.ops``, and the one module of it that exports none."""
    from liger_kernel import ops as liger

    return [*sorted(name for name in dir(liger) if name.endswith("Function")), "mm_int8int2.matmul"]


PACKAGE = Package("Liger-Kernel", "liger_kernel", "BSD-2-Clause", ops, lambda: len(public()), dict)
