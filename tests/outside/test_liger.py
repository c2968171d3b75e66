"""Kernels of other people, unmodified: nine of Liger-Kernel 0.8.5, seven with gradients, in three dtypes.

Each reference is plain torch written in Liger's own casting convention, read from its source: where a kernel rounds to
the input's dtype half way, so does the reference. Where Liger documents or enforces a limit, the spec says so with its
reason; a size of zero along the normalised dimension is refused by all of them (``view(-1, 0)`` is ambiguous).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example
from hypothesis import strategies as st

from pytest_fusion import FusionSpec, derived, dim, fused_equivalent, tensor, values
from pytest_fusion.spec.dims import Dim

pytest.importorskip("liger_kernel")

from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.llama4_rope import LigerLlama4RopeFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction

# calculate_settings() raises past 65536 columns; zero columns fail in torch before any kernel runs.
COLUMNS = dim(1, 65536)
EPS = st.sampled_from((1e-6, 1e-5))


def rms_norm_llama(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Casting mode "llama": the normalised value is rounded to ``x.dtype`` before the weight."""
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normalised.to(x.dtype) * weight


@pytest.mark.slow
@fused_equivalent(
    rms_norm_llama,
    inputs={"x": tensor("*batch n"), "weight": tensor("n"), "eps": EPS},
    dims={"n": COLUMNS},
    grad=True,
    clobbers="grad_outputs",  # in_place=True, its default, stores the gradient of x there
)
def test_rms_norm_llama(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    """Liger's rms_norm in Llama's casting mode agrees with HuggingFace's formula."""
    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama")


def rms_norm_gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Casting mode "gemma" with offset 1: float32 throughout, rounded once."""
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normalised * (1.0 + weight.float())).to(x.dtype)


@pytest.mark.slow
@fused_equivalent(
    rms_norm_gemma,
    inputs={"x": tensor("rows n"), "weight": tensor("n"), "eps": EPS},
    dims={"n": COLUMNS},
    grad=True,
)
def test_rms_norm_gemma(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    """Liger's rms_norm in Gemma's casting mode agrees with HuggingFace's formula, and spares the upstream gradient."""
    return LigerRMSNormFunction.apply(x, weight, eps, 1.0, "gemma", False)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Float32 throughout, rounded once."""
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


@pytest.mark.slow
@fused_equivalent(
    layer_norm,
    inputs={"x": tensor("*batch n"), "weight": tensor("n"), "bias": tensor("n"), "eps": EPS},
    dims={"n": COLUMNS},
)
def test_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
    """Liger's layer_norm agrees with torch's in float32, rounded once."""
    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu in float32, rounded to the dtype of ``up``, times ``up`` in that dtype."""
    return F.silu(gate.float()).to(up.dtype) * up


# Backward stores the gradients of both inputs over them.
GATED = {
    "inputs": {"gate": tensor("*batch n"), "up": tensor("*batch n")},
    "dims": {"n": COLUMNS},
    "grad": True,
    "clobbers": ("gate", "up"),
}


@pytest.mark.slow
@fused_equivalent(swiglu, **GATED)
def test_swiglu(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """Liger's swiglu agrees with silu(gate) * up."""
    return LigerSiLUMulFunction.apply(gate, up)


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The tanh form of gelu in float32, rounded to the dtype of ``up``, times ``up`` in that dtype."""
    return F.gelu(gate.float(), approximate="tanh").to(up.dtype) * up


@pytest.mark.slow
@fused_equivalent(geglu, **GATED)
def test_geglu(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """Liger's geglu agrees with gelu_tanh(gate) * up."""
    return LigerGELUMulFunction.apply(gate, up)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Float32 throughout (``tl.max`` widens, and what follows stays wide), rounded once."""
    return torch.softmax(x.float(), dim=-1).to(x.dtype)


@pytest.mark.slow
@fused_equivalent(softmax, inputs={"x": tensor("*batch n")}, dims={"n": COLUMNS})
def test_softmax(x: torch.Tensor) -> Any:
    """Liger's softmax agrees with torch's in float32, rounded once."""
    return LigerSoftmaxFunction.apply(x)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """HuggingFace's apply_rotary_pos_emb, in the dtype of ``q``: two products and a sum, each rounded."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def angles(tables: int, seq: int, half: int, like: torch.Tensor) -> torch.Tensor:
    """Rotation angles ``(tables, seq, 2 * half)``, float32, both halves equal; each table starts elsewhere."""
    position = torch.arange(seq, device=like.device) + 1000 * torch.arange(tables, device=like.device)[:, None]
    frequency = 10000.0 ** (-torch.arange(half, device=like.device) / half)
    angle = position[:, :, None] * frequency
    return torch.cat((angle, angle), dim=-1)


def rope_spec(name: str, seq: Dim, *, per_sequence: bool) -> FusionSpec:
    """Rope with one cos/sin table for all, or with one for each sequence of the batch."""

    def table(batch: int, seq: int, half: int, q: torch.Tensor) -> torch.Tensor:
        return angles(batch if per_sequence else 1, seq, half, q)

    def cos(batch: int, seq: int, half: int, q: torch.Tensor) -> torch.Tensor:
        return table(batch, seq, half, q).cos().to(q.dtype)

    def sin(batch: int, seq: int, half: int, q: torch.Tensor) -> torch.Tensor:
        return table(batch, seq, half, q).sin().to(q.dtype)

    def fused(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        # Rotated in place when (batch, seq, heads, size) is contiguous, the upstream gradients too.
        return LigerRopeFunction.apply(q, k, cos, sin)

    return FusionSpec(
        name=name,
        fused=fused,
        reference=rope,
        inputs={
            "q": tensor("batch heads seq 2*half"),
            "k": tensor("batch kv_heads seq 2*half"),
            "cos": derived(cos),
            "sin": derived(sin),
        },
        # Tiles are next_power_of_2 of the heads and of the head size: zero of either has no tile. The upper bounds keep
        # a case small: one program rotates all heads of one position.
        dims={
            "batch": dim(0, 3),
            "seq": seq,
            "heads": dim(1, 16),
            "kv_heads": dim(1, 16),
            "half": dim(1, 128),
        },
        grad=("q", "k"),
        clobbers=("q", "k", "grad_outputs"),
    )


test_rope = pytest.mark.slow(rope_spec("liger_rope", dim(2, 9), per_sequence=False).test())
test_rope_with_positions_per_sequence = pytest.mark.slow(
    rope_spec("liger_rope_per_sequence", dim(2, 9), per_sequence=True).test()
)

test_rope_of_one_position = pytest.mark.xfail(
    strict=True,
    reason="A real bug of Liger 0.8.5: rope_forward() takes q.stride(1) for the distance of two positions after "
    ".contiguous(), which leaves a (batch, 1, heads, size) tensor alone whatever the stride of its size-1 dimension. "
    "With q made sequence first, as view(1, batch, heads, size).transpose(0, 1), that stride is batch * heads * size: "
    "all sequences but the first stay unrotated, and the kernel reads and writes past the tensor.",
)(pytest.mark.slow(rope_spec("liger_rope_of_one_position", dim(1, 1), per_sequence=False).test()))


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float
) -> torch.Tensor:
    """Each row's loss in float32, divided by the rows that count, rounded to the logits' dtype; then their sum.

    Without a row that counts the loss is 0, where torch has NaN: Liger never visits the rows.
    """
    counted = target != ignore_index
    log_p = torch.log_softmax(logits.float(), dim=-1)
    loss = -log_p.gather(1, torch.where(counted, target, 0)[:, None])[:, 0]
    if label_smoothing > 0:
        loss = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(-1)
    loss = torch.where(counted, loss / counted.sum().clamp(min=1), 0.0)
    return loss.to(logits.dtype).sum()


def labels(rows: int, vocab: int, ignore_index: int, logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A class for each row, one row in four to be ignored."""
    classes = torch.randint(vocab, (rows,), generator=generator, device=generator.device)
    ignored = torch.rand(rows, generator=generator, device=generator.device) < 0.25
    return torch.where(ignored, ignore_index, classes).to(logits.device)


def cross_entropy_spec(name: str, vocab: Dim) -> FusionSpec:
    """Liger's cross entropy with ignored rows and label smoothing, of any logits."""

    def fused(logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float) -> Any:
        return LigerCrossEntropyFunction.apply(logits, target, None, ignore_index, 0.0, label_smoothing, "mean")[0]

    return FusionSpec(
        name=name,
        fused=fused,
        reference=cross_entropy,
        inputs={
            "logits": tensor("rows vocab"),
            "target": derived(labels),
            "ignore_index": st.sampled_from((-100, 0)),
            "label_smoothing": st.sampled_from((0.0, 0.1)),
        },
        # target.max() of no rows raises; the vocabulary is bounded only by memory.
        dims={"rows": dim(1), "vocab": vocab},
        grad="logits",
        clobbers="logits",  # ignored rows are zeroed, and with requires_grad the gradient overwrites the logits
        # Not proved with torch alone yet: the census calls it strides that nothing promises.
        allow={"ignores-strides": "the gradient of transposed logits is another one"},
    )


test_cross_entropy = pytest.mark.slow(cross_entropy_spec("liger_cross_entropy", dim(1, 32768)).test())

test_cross_entropy_of_several_blocks = pytest.mark.xfail(
    strict=True,
    reason="A real bug of Liger 0.8.5, there since 0.1.0: the running sum of exponentials is scaled by exp(m - m_new), "
    "and both are -inf as long as nothing finite was seen. Of logits whose first 32768 columns, a whole block, are "
    "-inf (masked classes) the loss is NaN: [-inf] * 32768 + 7232 normal numbers, target 39999: torch 8.85, Liger NaN.",
)(
    pytest.mark.slow(
        # A budget of seconds may end before the last cases, whose rows are the longest.
        example(rows=2, vocab=65536, dtype=torch.float16, values="masked")(
            cross_entropy_spec("liger_cross_entropy_of_several_blocks", dim(1)).test()
        )
    )
)


def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Logits in the dtype of ``x``, the mean of their losses in float32; 0 where no row counts."""
    logits = (x @ weight.T).float()
    return F.cross_entropy(logits, target, reduction="sum") / (target != -100).sum().clamp(min=1)


def linear_labels(rows: int, vocab: int, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return labels(rows, vocab, -100, x, generator)


def fused_linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Any:
    # torch 2.13's bfloat16 product on a CPU reads between the rows of a padded matrix of odd width, also NaN.
    return LigerFusedLinearCrossEntropyFunction.apply(x.contiguous(), weight.contiguous(), target)[0]


test_fused_linear_cross_entropy = pytest.mark.slow(
    FusionSpec(
        name="liger_fused_linear_cross_entropy",
        fused=fused_linear_cross_entropy,
        reference=linear_cross_entropy,
        inputs={"x": tensor("rows hidden"), "weight": tensor("vocab hidden"), "target": derived(linear_labels)},
        dims={"rows": dim(1), "vocab": dim(1, 32768), "hidden": dim(1)},
        grad=True,
        syncs=True,  # it counts the rows on the host
        allow={
            "gradient-missing": "forward makes the gradients, and asks x alone whether any are wanted: a head that is "
            "trained on frozen features gets none",
            "second-backward": "backward multiplies what forward has made by the upstream gradient, in place",
        },
    ).test()
)


def llama4_rope(q: torch.Tensor, k: torch.Tensor, rotations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Neighbouring elements as complex numbers, times a unit number of their position, in float32."""
    return turned(q, rotations), turned(k, rotations)


def turned(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[None, :, None]).flatten(3).to(x.dtype)


def rotations(seq: int, half: int, q: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    angle = 6 * torch.rand(seq, half, generator=generator, device=generator.device)
    return torch.polar(torch.ones_like(angle), angle).to(q.device)


def llama4_rope_spec(name: str, seq: Dim) -> FusionSpec:
    """Llama 4's rope, of up to as many features as its heads have twice over."""

    def fused(q: torch.Tensor, k: torch.Tensor, rotations: torch.Tensor) -> Any:
        return LigerLlama4RopeFunction.apply(q, k, rotations)

    return FusionSpec(
        name=name,
        fused=fused,
        reference=llama4_rope,
        inputs={
            "q": tensor("batch seq heads 2*half", values=values.finite()),
            "k": tensor("batch seq kv_heads 2*half", values=values.finite()),
            "rotations": derived(rotations),
        },
        # Tiles hold all heads of a position, as those of rope above do.
        dims={"batch": dim(1, 3), "seq": seq, "heads": dim(1, 12), "kv_heads": dim(1, 12), "half": dim(1, 128)},
        dtypes=[torch.float32],
        clobbers=("q", "k"),
    )


test_llama4_rope = pytest.mark.slow(llama4_rope_spec("liger_llama4_rope", dim(2, 20)).test())

test_llama4_rope_of_one_position = pytest.mark.xfail(
    strict=True,
    reason="A real bug of Liger 0.8.5: as in rope, q.stride(1) is taken for the distance of two positions after "
    ".contiguous(), which leaves (batch, 1, heads, size) as it is whatever the stride of its size-1 dimension. For q "
    "made as (batch, heads, 1, size).transpose(1, 2) that stride is size, for heads * size: of two sequences with four "
    "heads of 8 the second is off by up to 3.7.",
)(pytest.mark.slow(llama4_rope_spec("liger_llama4_rope_of_one_position", dim(1, 1)).test()))
