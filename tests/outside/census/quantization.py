"""Four and eight bits: bitsandbytes' Triton backend, AutoAWQ, GPTQModel, torchao, onebitllms."""

# ruff: noqa: PLW0108 - the names of the lambdas' parameters are those of the inputs
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pytest_fusion import derived, dim, tensor, values
from tests.outside.census.entry import Kernel, kernel, without_init

# Dettmers et al., "QLoRA", appendix E.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
# AWQ packs eight columns into 32 bits, in this order of nibbles.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
WORDS = values.integers(-(2**31), 2**31 - 1)
SUMS = dict.fromkeys(
    ("low-precision-accumulation", "overflow"), "AutoAWQ 0.2.9: the product of four-bit weights adds up in float16"
)
LARGE = {"low-precision-accumulation": "onebitllms 0.0.4: float16 weights past 256 become NaN"}
HALVES = {"unexplained": "onebitllms 0.0.4: halves are rounded up"}
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.01, "lr": 1e-3, "step": 3}


def nibbles(packed: Tensor, order: Sequence[int], axis: int) -> Tensor:
    return torch.stack([(packed >> 4 * i) & 15 for i in order], axis + 1).flatten(axis, axis + 1)


def awq_weights(packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    weights = nibbles(packed, AWQ_ORDER, 1) - nibbles(zeros, AWQ_ORDER, 1).repeat_interleave(32, 0)
    return weights * scales.repeat_interleave(32, 0)


def awq_linear(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return x @ awq_weights(packed, scales, zeros)


def gptq_weights(packed: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    weights, zero = nibbles(packed, range(8), 0), nibbles(zeros, range(8), 1)
    return scales[groups.long()] * (weights - zero[groups.long()])


def nf4_weights(packed: Tensor, scales: Tensor) -> Tensor:
    codes = torch.tensor(NF4, device=packed.device)[torch.stack((packed >> 4, packed & 15), -1).flatten().long()]
    return (codes * scales.repeat_interleave(64)).to(scales.dtype)


def blocks_of_8_bits(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    return table[codes.long()] * scales.repeat_interleave(64)


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2."""
    a = ADAM
    m.mul_(a["beta1"]).add_((1 - a["beta1"]) * g)
    v.mul_(a["beta2"]).add_((1 - a["beta2"]) * g * g)
    first, second = m / (1 - a["beta1"] ** a["step"]), v / (1 - a["beta2"] ** a["step"])
    p.copy_(p * (1 - a["lr"] * a["decay"]) - a["lr"] * first / (second.sqrt() + a["eps"]))


def fp8_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    parts = x.float().unflatten(-1, (-1, 128))
    scales = parts.abs().amax(-1) / 448
    return (parts / scales[..., None]).flatten(-2).to(torch.float8_e4m3fn), scales


def fp8_dequantized(x: Tensor, scales: Tensor) -> Tensor:
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: x.shape[0], : x.shape[1]]
    return x.float() * wide


def int8_linear(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    return ((a.double() @ b.double()) * rows[:, None] * columns).to(rows.dtype)


def bit_activations(x: Tensor) -> Tensor:
    """Wang et al., "BitNet b1.58": eight bits with a scale for each token."""
    scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale


def bit_weights(w: Tensor) -> Tensor:
    """The same paper: weights of -1, 0 and 1, by the mean magnitude."""
    scale = 1 / w.abs().mean().clamp(min=1e-5)
    return (w * scale).round().clamp(-1, 1) / scale


def groups_of(groups: int, generator: torch.Generator) -> Tensor:
    """The group of each of ``32 * groups`` rows, as activation order leaves them."""
    rows = torch.arange(32 * groups, device=generator.device) // 32
    return rows[torch.randperm(len(rows), generator=generator, device=generator.device)].int()


def dynamic_table(packed_dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, 256, dtype=packed_dtype)


def bitsandbytes() -> list[Kernel]:
    from bitsandbytes.backends.triton import kernels_4bit, kernels_8bit_quant, kernels_optim

    def nf4(packed: Tensor, scales: Tensor) -> Tensor:
        out = torch.empty(2 * packed.numel(), dtype=scales.dtype, device=packed.device)
        kernels_4bit.dequantize_4bit_impl(packed, scales, 64, "nf4", scales.dtype, out)
        return out

    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        a = ADAM
        kernels_optim.optimizer_update_32bit_impl(
            "adam", g, p, m, v, None, 0.0, 0.0, a["beta1"], a["beta2"], 0.0, 0.0, a["eps"], a["decay"], a["step"],
            a["lr"],
        )  # fmt: skip

    state = {"layouts": ("contiguous",), "dtype": torch.float32}
    return [
        kernel("bitsandbytes, dequantize_4bit, nf4", nf4, nf4_weights,
               {"packed": tensor("32*blocks", dtype=torch.uint8, values=values.integers(0, 255)),
                "scales": tensor("blocks", values=values.uniform(0.1, 4.0))}, dims={"blocks": dim(1, 64)}),
        kernel("bitsandbytes, dequant_8bit_blockwise", lambda codes, scales, table:
               kernels_8bit_quant.dequant_8bit_blockwise(codes, scales, table, 64, scales.dtype), blocks_of_8_bits,
               {"codes": tensor("64*blocks", dtype=torch.uint8, values=values.integers(0, 255)),
                "scales": tensor("blocks", dtype=torch.float32, values=values.uniform(0.1, 4.0)),
                "table": derived(lambda scales: dynamic_table().to(scales.device))}, dims={"blocks": dim(1, 64)}),
        kernel("bitsandbytes, Adam of 32 bits", update, adam,
               {"p": tensor("n", layouts=("contiguous",)), "g": tensor("n"), "m": tensor("n", **state),
                "v": tensor("n", values=values.uniform(0.0, 1.0), **state)}, dims={"n": dim(1)},
               mutates=("p", "m", "v")),
    ]  # fmt: skip


def awq() -> list[Kernel]:
    without_init("awq", "awq.modules", "awq.modules.triton")
    gemm = importlib.import_module("awq.modules.triton.gemm")
    packed = {
        "packed": tensor("32*groups words", dtype=torch.int32, values=WORDS),
        "scales": tensor("groups 8*words", values=values.uniform(0.01, 0.1)),
        "zeros": tensor("groups words", dtype=torch.int32, values=WORDS),
    }
    dims = {"groups": dim(1, 4), "words": dim(1, 12)}
    return [
        kernel("AutoAWQ, awq_dequantize", lambda packed, scales, zeros:
               gemm.awq_dequantize_triton(packed, scales, zeros), awq_weights, packed, dims=dims,
               dtypes=(torch.float16,)),
        kernel("AutoAWQ, awq_gemm", lambda x, packed, scales, zeros: gemm.awq_gemm_triton(x, packed, scales, zeros, 1),
               awq_linear, {"x": tensor("rows 32*groups"), **packed}, dims={**dims, "rows": dim(1, 40)},
               dtypes=(torch.float16,), proved=SUMS),
    ]  # fmt: skip


def gptq() -> list[Kernel]:
    without_init("gptqmodel", "gptqmodel.utils", "gptqmodel.nn_modules", "gptqmodel.nn_modules.triton_utils")
    # The flag is all that is taken from a module that imports the rest of the package.
    if "gptqmodel.utils.torch" not in sys.modules:
        flags = type(sys)("gptqmodel.utils.torch")
        flags.HAS_XPU = False  # type: ignore[attr-defined]
        sys.modules[flags.__name__] = flags
    dequant = importlib.import_module("gptqmodel.nn_modules.triton_utils.dequant").dequant
    return [
        kernel("GPTQModel, dequant of 4 bits", lambda packed, scales, zeros, groups:
               dequant(scales.dtype, packed, scales, zeros, groups, 4, 32, 15), gptq_weights,
               {"packed": tensor("4*many 8*words", dtype=torch.int32, values=WORDS),
                "scales": tensor("many 8*words", values=values.uniform(0.01, 0.1)),
                "zeros": tensor("many words", dtype=torch.int32, values=WORDS),
                "groups": derived(lambda many, generator: groups_of(many, generator))},
               dims={"many": dim(1, 4), "words": dim(1, 12)}, dtypes=(torch.float16, torch.bfloat16)),
    ]  # fmt: skip


def torchao() -> list[Kernel]:
    from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant, fp8_blockwise_weight_dequant
    from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm_cuda

    codes = values.integers(-128, 127)
    return [
        kernel("torchao, fp8_blockwise_act_quant", lambda x: fp8_blockwise_act_quant(x), fp8_blocks,
               {"x": tensor("rows 128*blocks")}, wide=(0, 1), dims={"rows": dim(1), "blocks": dim(1, 16)},
               devices=("cuda",)),  # it takes a machine without a GPU for one without Triton
        kernel("torchao, fp8_blockwise_weight_dequant", lambda x, scales: fp8_blockwise_weight_dequant(x, scales),
               fp8_dequantized,
               {"x": derived(lambda rows, columns, generator: torch.randn(
                   128 * rows, 128 * columns, generator=generator, device=generator.device).to(torch.float8_e4m3fn)),
                "scales": tensor("rows columns", dtype=torch.float32, values=values.uniform(0.01, 1.0))},
               dims={"rows": dim(1, 3), "columns": dim(1, 3)}, devices=("cuda",)),
        kernel("torchao, scaled_int8_mm", lambda a, b, rows, columns: scaled_int8_mm_cuda(a, b, rows, columns),
               int8_linear,
               {"a": tensor("m k", dtype=torch.int8, values=codes), "b": tensor("k n", dtype=torch.int8, values=codes),
                "rows": tensor("m", values=values.uniform(0.01, 0.1), layouts=("contiguous",)),
                "columns": tensor("n", values=values.uniform(0.01, 0.1), layouts=("contiguous",))},
               dims={"m": dim(1, 80), "k": dim(1, 200), "n": dim(1, 80)}),
    ]  # fmt: skip


def onebitllms() -> list[Kernel]:
    without_init("onebitllms", "onebitllms.kernels")
    from onebitllms.kernels.activation_quant import activation_quant_triton
    from onebitllms.kernels.weight_quant import weight_quant_triton

    return [
        kernel("onebitllms, activation_quant", lambda x: activation_quant_triton(x), bit_activations,
               {"x": tensor("batch seq n")}, dims={"batch": dim(1), "seq": dim(1), "n": dim(1, 4096)},
               proved=HALVES),
        kernel("onebitllms, weight_quant", lambda w: weight_quant_triton(w), bit_weights, {"w": tensor("rows n")},
               dims={"rows": dim(1), "n": dim(1)}, proved={**HALVES, **LARGE}),
    ]  # fmt: skip


PACKAGES: tuple[Callable[[], list[Kernel]], ...] = (bitsandbytes, awq, gptq, torchao, onebitllms)


def kernels() -> list[Kernel]:
    found = []
    for package in PACKAGES:
        try:
            found += package()
        except ImportError as error:
            print(f"{package.__name__}: {error}", file=sys.stderr)
    return found
