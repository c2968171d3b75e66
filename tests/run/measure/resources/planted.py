"""Kernels and launchers that a compiler sees otherwise than the interpreter, each with an honest twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from pytest_fusion import FusionSpec, dim, fused_equivalent, tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
# Another number where the module is imported to be compiled.
ROUNDS = tl.constexpr(2 if INTERPRETED else 3)


@triton.jit
def row_kernel(y, x, n, BLOCK: tl.constexpr):
    """The row stays live across a maximum and a sum: BLOCK / (32 * num_warps) values a thread."""
    at = tl.arange(0, BLOCK)
    row = tl.load(x + at, mask=at < n, other=float("-inf"))
    power = tl.exp(row - tl.max(row))
    tl.store(y + at, power / tl.sum(power), mask=at < n)


def row(x: torch.Tensor, warps: int) -> torch.Tensor:
    y = torch.empty_like(x)
    row_kernel[(1,)](y, x, x.numel(), BLOCK=triton.next_power_of_2(x.numel()), num_warps=warps)
    return y


def spilling(x: torch.Tensor) -> torch.Tensor:
    """16384 float32 values in one warp: 512 a thread, which has 255 registers."""
    return row(x, 1)


def fitting(x: torch.Tensor) -> torch.Tensor:
    """The same with 16 warps."""
    return row(x, 16)


@triton.jit
def dict_kernel(y, x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    scale = {"two": 2.0}["two"]
    tl.store(y + at, tl.load(x + at, mask=at < n) * scale, mask=at < n)


def rejected(x: torch.Tensor) -> torch.Tensor:
    """Python executes a dict inside of a kernel, the compiler does not know one."""
    y = torch.empty_like(x)
    dict_kernel[(1,)](y, x, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return y


@triton.jit
def product_kernel(y, a, b, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, depth = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for step in range(steps):
        left = tl.load(a + rows * steps * K + step * K + depth[None, :])
        total += tl.dot(left, tl.load(b + (step * K + depth[:, None]) * N + columns))
    tl.store(y + rows * N + columns, total)


def product(a: torch.Tensor, kernel: Any, **config: Any) -> torch.Tensor:
    y = torch.empty((64, 128), dtype=torch.float32, device=a.device)
    kernel[(1,)](y, a, a, a.shape[0] // 64, M=64, N=128, K=64, **config)
    return y


def wide(a: torch.Tensor) -> torch.Tensor:
    """A stage of 64 x 64 and 64 x 128 halves is 24576 bytes: 7 are too many for a block on sm_80, 8 fit on sm_90."""
    return product(a, product_kernel, num_warps=4, num_stages=8)


def chosen(a: torch.Tensor) -> torch.Tensor:
    """The same launcher asks the device what it has."""
    old = torch.cuda.get_device_capability(a.device) < (9, 0)
    return product(a, product_kernel, num_warps=4, num_stages=4 if old else 8)


tuned_kernel = triton.autotune(
    [triton.Config({}, num_warps=4, num_stages=8), triton.Config({}, num_warps=4, num_stages=2)], key=["steps"]
)(product_kernel)


def tuned(a: torch.Tensor) -> torch.Tensor:
    """An autotuner passes over the config for which there is no room."""
    return product(a, tuned_kernel)


@triton.jit
def hopper_kernel(y, x, n, BLOCK: tl.constexpr):
    tl.static_assert(tl.target_info.cuda_capability_geq(9, 0), "Hopper and later")
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


def hopper(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    hopper_kernel[(1,)](y, x, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return y


@triton.jit(do_not_specialize=["n"])
def steady_kernel(y, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def steady(x: torch.Tensor) -> torch.Tensor:
    """One compilation whatever the size."""
    y = torch.empty_like(x)
    steady_kernel[(triton.cdiv(x.numel(), 128),)](y, x, x.numel(), BLOCK=128)
    return y


@triton.jit
def eager_kernel(y, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def recompiling(x: torch.Tensor) -> torch.Tensor:
    """Compiled for n == 1, for multiples of 16, and for the rest."""
    y = torch.empty_like(x)
    eager_kernel[(triton.cdiv(x.numel(), 128),)](y, x, x.numel(), BLOCK=128)
    return y


@triton.jit
def rounds_kernel(y, x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    for _ in tl.static_range(ROUNDS):
        value *= 2
    tl.store(y + at, value, mask=at < n)


def launcher_of(kernel: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A launcher without a name of its own: no other process can call it."""

    def launch(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        kernel[(1,)](y, x, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
        return y

    return launch


def nameless_kernel() -> Any:
    """A kernel without a name of its own."""

    @triton.jit
    def kernel(y, x, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

    return kernel


made_kernel = nameless_kernel()


def silent(x: torch.Tensor) -> torch.Tensor:
    """Launches nothing."""
    return x * 2


def stopping(x: torch.Tensor) -> torch.Tensor:
    """Reads what its own first kernel was to compute."""
    y = recompiling(x)
    if not y.any():
        raise ValueError("nothing was computed")
    return recompiling(y)


def sized_by_values(x: torch.Tensor) -> torch.Tensor:
    """Its tile comes from what another kernel computed: without one it is 0, which no compiler takes."""
    y = torch.empty_like(x)
    eager_kernel[(1,)](y, recompiling(x), x.numel(), BLOCK=int(recompiling(x).max()))
    return y


@triton.jit
def float8_kernel(y, x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n).to(tl.float8e4nv)
    tl.store(y + at, value.to(tl.float32), mask=at < n)


def float8(x: torch.Tensor) -> torch.Tensor:
    """float8e4nv came with compute capability 8.9."""
    y = torch.empty_like(x)
    float8_kernel[(1,)](y, x, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return y


class Doubled(torch.autograd.Function):
    """Launches one kernel forward and another backward."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return steady(x)

    @staticmethod
    def backward(_: Any, above: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return recompiling(above.contiguous())


def doubled(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
    return result


def _reference(x: torch.Tensor) -> torch.Tensor:
    return x


def spec(fused: Callable[..., torch.Tensor], **keywords: Any) -> FusionSpec:
    return FusionSpec(
        name=getattr(fused, "__name__", "nameless"),
        fused=fused,
        reference=_reference,
        inputs={"x": tensor("n")},
        **keywords,
    )


def matrix(fused: Callable[..., torch.Tensor]) -> FusionSpec:
    inputs = {"a": tensor("k n", dtype=torch.float16)}
    return FusionSpec(fused=fused, reference=lambda a: a, inputs=inputs, dims={"k": dim(multiple_of=64)})


@fused_equivalent(_reference, inputs={"x": tensor("n")})
def decorated(x: torch.Tensor) -> torch.Tensor:
    return steady(x)
