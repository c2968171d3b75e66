# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""``x * scale`` where the launch is the matter: its stream, its device, what it waits for, how many there are.

``x`` is ``(n,)`` on a CUDA device; the result is float32 inside and rounded to ``x.dtype`` once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pytest_fusion import FusionSpec, dim, tensor

SCALE = 3.0
_streams: dict[torch.device, torch.cuda.Stream] = {}


def reference(x: Tensor) -> Tensor:
    return (x.float() * SCALE).to(x.dtype)


@triton.jit
def scale_kernel(x, out, n, pitch, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i * pitch, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + i, (value * scale).to(out.dtype.element_ty), mask=i < n)


def _launch(x: Tensor, out: Tensor) -> Tensor:
    n = x.numel()
    if n:
        scale_kernel[(triton.cdiv(n, 256),)](x, out, n, x.stride(0), SCALE, BLOCK=256)
    return out


def scaled(x: Tensor, *, bug: str = "") -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if bug == "side-stream":
        # vllm #13632: a stream of its own, and no event for the ones before and after it.
        with torch.cuda.stream(_streams.setdefault(x.device, torch.cuda.Stream(x.device))):
            return _launch(x, out)
    if bug == "default-stream":
        with torch.cuda.stream(torch.cuda.default_stream(x.device)):
            return _launch(x, out)
    if bug == "no-device-guard":
        return _launch(x, out)
    with torch.cuda.device(x.device):
        if bug == "synchronises":
            torch.cuda.current_stream(x.device).synchronize()
        if bug == "looks-at-values" and x.numel() and bool(torch.isnan(x).all()):
            return torch.full_like(out, torch.nan)
        if bug == "two-launches":
            return _launch(x, out).mul_(1)
        return _launch(x, out)


def make_spec(bug: str = "") -> FusionSpec:
    def fused(x: Tensor) -> Tensor:
        return scaled(x, bug=bug)

    return FusionSpec(
        name=f"launch {bug}".strip(),
        fused=fused,
        reference=reference,
        inputs={"x": tensor("n")},
        dims={"n": dim(0, 4096)},
        max_launches=1,
        requires="cuda",
    )
