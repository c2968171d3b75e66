"""Numbers that disagree easily: every dtype's extremes, specials, ties and random bit patterns, side by side."""

from __future__ import annotations

import zlib

import numpy as np
import torch

TORCH: dict[str, torch.dtype] = {
    "int1": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
LANGUAGE: dict[str, str] = {
    **{name: f"tl.{name}" for name in TORCH if "int" in name},
    "fp16": "tl.float16",
    "bf16": "tl.bfloat16",
    "fp32": "tl.float32",
    "fp64": "tl.float64",
    "fp8e4nv": "tl.float8e4nv",
    "fp8e5": "tl.float8e5",
}

SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = (*SIGNED, *UNSIGNED)
FLOAT8 = ("fp8e4nv", "fp8e5")
FLOATS = ("fp16", "bf16", "fp32", "fp64")
ALL = ("int1", *INTEGERS, *FLOATS, *FLOAT8)

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, 1e-8, 6e4, 1e30, np.inf, -np.inf, np.nan]


def is_float(dtype: str) -> bool:
    return dtype in FLOATS or dtype in FLOAT8


def values(dtype: str, count: int, seed: str, *, tame: bool = False) -> torch.Tensor:
    """``count`` values that depend on ``seed`` alone; ``tame`` ones are small whole numbers, many of them equal."""
    rng = np.random.default_rng(zlib.crc32(f"{dtype}/{seed}".encode()))
    if dtype == "int1":
        return torch.from_numpy(rng.integers(0, 2, count).astype(np.bool_))
    kind = TORCH[dtype]
    low = 0 if dtype in UNSIGNED else -4
    small = torch.from_numpy(rng.integers(low, 5, count))
    if tame:
        return small.to(torch.float32).to(kind) if is_float(dtype) else small.to(kind)
    width = torch.empty(0, dtype=kind).element_size()
    patterns = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, count)).to(_BITS[width]).view(kind)
    if is_float(dtype):
        ordinary = torch.from_numpy(rng.standard_normal(count) * np.exp2(rng.integers(-3, 4, count)))
        special = torch.from_numpy(rng.choice(_SPECIAL, count))
        choices = [ordinary, ordinary, small.double(), special, patterns.double()]
        chosen = torch.stack(choices)[torch.from_numpy(rng.integers(0, len(choices), count)), torch.arange(count)]
        return chosen.to(torch.float32).to(kind) if dtype in FLOAT8 else chosen.to(kind)
    ends = torch.iinfo(kind)
    corners = torch.tensor(
        [0, 1, 2, ends.max, ends.max - 1, ends.min, ends.min + 1],
        dtype=torch.uint64 if dtype == "uint64" else torch.int64,
    ).to(torch.int64)
    special = corners[torch.from_numpy(rng.integers(0, len(corners), count))]
    choices = [small, special, patterns.to(torch.int64)]
    chosen = torch.stack(choices)[torch.from_numpy(rng.integers(0, len(choices), count)), torch.arange(count)]
    return chosen.to(_BITS[width]).view(kind)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns as integers, one pattern for every NaN.

    Which NaN an operation returns is left open by IEEE 754-2019 (6.2.3) and differs between numpy's loops for
    contiguous and for strided arrays; that it is one is compared.
    """
    patterns = tensor.view(_BITS[tensor.element_size()]).clone()
    if tensor.is_floating_point():
        patterns[tensor.double().isnan()] = -1
    return patterns
