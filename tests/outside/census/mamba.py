"""The Triton kernels of mamba-ssm. Its CUDA extension is not needed."""

# ruff: noqa: PLW0108 - the names of the lambdas' parameters are those of the inputs
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pytest_fusion import dim, tensor, values
from tests.outside.census import formulas
from tests.outside.census.entry import Kernel, kernel, without_init
from tests.outside.census.formulas import EPS


def gated(x: Tensor, weight: Tensor, z: Tensor) -> Tensor:
    return formulas.rms_norm(x * F.silu(z), weight)


def add_norm(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return formulas.rms_norm(total, weight), total


def decays(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Sums of negative numbers along the last dimension."""
    return -torch.rand(shape, generator=generator, device=generator.device).cumsum(-1).to(dtype)


def step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
    """Gu and Dao, "Mamba", one position: the state is decayed, takes in ``dt * B * x``, and is read by ``C``."""
    dt = F.softplus(dt + dt_bias)
    state.copy_(state * (dt[..., None] * A).exp() + (dt * x)[..., None] * B[:, None])
    return torch.einsum("bdn,bn->bd", state.to(C.dtype), C) + D * x


def states(B: Tensor, x: Tensor, dt: Tensor, decay: Tensor) -> Tensor:
    """``sum over a chunk of exp(decay at its end - decay) * dt * B x``, for each chunk and head."""
    scale = (decay[..., -1:] - decay).exp() * dt
    return torch.einsum("bclhn,bhcl,bclhp->bchpn", B, scale, x)


def chunk_states(B: Tensor, x: Tensor, dt: Tensor, decay: Tensor) -> Tensor:
    chunks, length = dt.shape[2:]
    heads = x.shape[2]
    B = B.repeat_interleave(heads // B.shape[2], 2).unflatten(1, (chunks, length))
    return states(B.float(), x.unflatten(1, (chunks, length)).float(), dt, decay)


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Dao and Gu, "Transformers are SSMs", position by position; one group of ``B`` and ``C``."""
    batch, seq, heads, size = x.shape
    state = torch.zeros(batch, heads, size, B.shape[-1], dtype=x.dtype, device=x.device)
    out = []
    for t in range(seq):
        decay = (dt[:, t] * A).exp()[..., None, None]
        state = state * decay + (dt[:, t][..., None] * x[:, t])[..., None] * B[:, t][:, :, None]
        out.append(torch.einsum("bhpn,bn->bhp", state.to(x.dtype), C[:, t, 0]))
    return torch.stack(out, 1)


def kernels() -> list[Kernel]:
    without_init("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.utils")
    from mamba_ssm.ops.triton.k_activations import swiglu
    from mamba_ssm.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.ops.triton.ssd_chunk_state import chunk_state

    rows = {"rows": dim(1), "n": dim(1, 8192)}
    normed = {"x": tensor("rows n"), "weight": tensor("n")}
    positive = values.uniform(0.01, 1.0)
    found = [
        kernel("rms_norm_fn, residual", lambda x, weight, residual:
               rms_norm_fn(x, weight, None, residual=residual, prenorm=True, eps=EPS), add_norm,
               {**normed, "residual": tensor("rows n")}, dims=rows, grad=True),
        kernel("layer_norm_fn", lambda x, weight, bias: layer_norm_fn(x, weight, bias, eps=EPS), formulas.layer_norm,
               {**normed, "bias": tensor("n")}, dims=rows, grad=True),
        kernel("rmsnorm_fn, gated", lambda x, weight, z:
               rmsnorm_fn(x, weight, None, z=z, eps=EPS, norm_before_gate=False), gated,
               {**normed, "z": tensor("rows n")}, dims=rows, grad=True),
        kernel("swiglu", lambda x: swiglu(x), lambda x: F.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :],
               {"x": tensor("rows 2*half")}, dims={"rows": dim(1), "half": dim(1, 8192)}, grad=True),
        kernel("selective_state_update", lambda state, x, dt, A, B, C, D, dt_bias:
               selective_state_update(state, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True), step,
               {"state": tensor("batch n size"), "x": tensor("batch n"), "dt": tensor("batch n"),
                "A": tensor("n size", values=values.uniform(-2.0, -0.1)), "B": tensor("batch size"),
                "C": tensor("batch size"), "D": tensor("n"), "dt_bias": tensor("n")},
               dims={"batch": dim(1, 4), "n": dim(1, 200), "size": dim(1, 64)}, mutates="state"),
        kernel("chunk_state", lambda B, x, dt, decay: chunk_state(B, x, dt, decay), chunk_states,
               {"B": tensor("batch 16*chunks 1 size"), "x": tensor("batch 16*chunks heads out"),
                "dt": tensor("batch heads chunks 16", dtype=torch.float32, values=positive),
                "decay": tensor("batch heads chunks 16", dtype=torch.float32, values=decays)},
               wide=(0,), dims={"batch": dim(1, 2), "chunks": dim(1, 4), "heads": dim(1, 4), "size": dim(1, 40),
                                "out": dim(1, 40)}, grad=("B", "x")),
    ]  # fmt: skip
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:  # it needs causal_conv1d
        return found
    return [
        *found,
        kernel("mamba_chunk_scan_combined", lambda x, dt, A, B, C: mamba_chunk_scan_combined(x, dt, A, B, C, 64), scan,
               {"x": tensor("batch seq heads size"), "dt": tensor("batch seq heads", values=positive),
                "A": tensor("heads", dtype=torch.float32, values=values.uniform(-2.0, -0.1)),
                "B": tensor("batch seq 1 n"), "C": tensor("batch seq 1 n")},
               dims={"batch": dim(1, 2), "seq": dim(1, 150), "heads": dim(1, 3), "size": dim(1, 40),
                     "n": dim(1, 40)}, grad=True),
    ]  # fmt: skip
