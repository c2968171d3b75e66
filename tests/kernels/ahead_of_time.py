"""Compiles the launches of the suite's kernels for sm_90 on a machine without a GPU, and tells what they take.

Run as a program, with one dtype as its argument, in a process without TRITON_INTERPRET: which of the two a kernel is
gets decided when it is decorated. The launchers themselves are called; only Triton's last step is replaced by one that
notes the arguments, so that what is compiled is what would have been launched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reference_kernels.glu import kernel as glu
from reference_kernels.linear import kernel as linear
from reference_kernels.moe_gate import kernel as moe_gate
from reference_kernels.rms_norm import kernel as rms_norm
from reference_kernels.rope import kernel as rope
from reference_kernels.sampling import kernel as sampling
from reference_kernels.softmax import kernel as softmax

KERNELS = (
    softmax._softmax_kernel,
    rms_norm._rms_norm_kernel,
    linear._linear_kernel,
    glu._glu_kernel,
    glu._glu_backward_kernel,
    rope._rope_kernel,
    sampling._sample_kernel,
    moe_gate._moe_gate_kernel,
    moe_gate._moe_gate_backward_kernel,
)
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Representative launches by name; the memory is never touched, so sizes cost nothing."""

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind)

    keep = empty(64, 8192, kind=torch.bool)
    halves = empty(64, 14336), empty(64, 14336)
    heads, angles = (empty(2, 64, 32, 128), empty(2, 64, 8, 128)), [empty(64, 64, kind=torch.float32)] * 2
    partial = empty(2, 64, 32, 96), empty(2, 64, 32, 96)
    vocabulary, number = empty(64, 128256), empty(64, kind=torch.float32)
    seen, whole = empty(64, 128256, kind=torch.bool), empty(64, kind=torch.int64)
    gates, chosen, slots = empty(32768, 256), empty(32768, 8), empty(32768, 8, kind=torch.int64)
    return {
        "softmax short": lambda: softmax._softmax(empty(64, 100), 1.0, None, None),
        "softmax": lambda: softmax._softmax(empty(64, 8192), 1.0, None, None),
        "softmax masked": lambda: softmax._softmax(empty(64, 8192), 1.0, keep, empty(8192)),
        "softmax widest tile": lambda: softmax._softmax(empty(64, 16384), 1.0, None, None),
        "softmax loop": lambda: softmax._softmax(empty(64, 50000), 1.0, None, None),
        "softmax unfoldable": lambda: softmax._softmax(empty(3, 4, 5, 30).transpose(0, 2), 1.0, None, None),
        "rms_norm llama": lambda: rms_norm._rms_norm(empty(64, 8192), empty(8192), 1e-6, "llama"),
        "rms_norm gemma": lambda: rms_norm._rms_norm(empty(64, 8192), empty(8192), 1e-6, "gemma"),
        "rms_norm widest tile": lambda: rms_norm._rms_norm(empty(64, 16384), empty(16384), 1e-6, "torch"),
        "rms_norm loop": lambda: rms_norm._rms_norm(empty(64, 50000), None, 1e-6, "torch"),
        "linear few rows": lambda: linear._linear(empty(5, 4096), empty(4096, 4096), empty(4096), "relu"),
        "linear medium": lambda: linear._linear(empty(1024, 1024), empty(1024, 1024), empty(1024), "silu"),
        "linear large": lambda: linear._linear(empty(8192, 8192), empty(8192, 8192), empty(8192), "relu"),
        "linear large gelu": lambda: linear._linear(empty(8192, 8192), empty(8192, 8192), None, "gelu"),
        "linear transposed": lambda: linear._linear(empty(70, 300).t(), empty(70, 33).t(), None, None),
        "glu silu": lambda: glu._glu(*halves, "silu"),
        "glu gelu": lambda: glu._glu(*halves, "gelu"),
        "glu gelu_tanh": lambda: glu._glu(*halves, "gelu_tanh"),
        "glu packed": lambda: glu._glu_packed(empty(64, 28672), "silu"),
        "glu packed narrow": lambda: glu._glu_packed(empty(64, 66), "silu"),
        "glu backward silu": lambda: glu._glu_backward(halves[0], *halves, "silu"),
        "glu backward gelu": lambda: glu._glu_backward(halves[0], *halves, "gelu"),
        "glu backward gelu_tanh": lambda: glu._glu_backward(halves[0], *halves, "gelu_tanh"),
        "glu backward packed": lambda: glu._glu_packed_backward(halves[0], empty(64, 28672), "silu"),
        "rope half": lambda: rope._rope(*heads, *angles, False, False),
        "rope interleaved": lambda: rope._rope(*heads, *angles, True, True),
        "rope partial": lambda: rope._rope(*partial, *(angle[:, :16] for angle in angles), False, False),
        "rope widest": lambda: rope._rope(empty(9, 7, 1024), empty(9, 1, 1024), *[empty(9, 512)] * 2, True, False),
        "sample": lambda: sampling._sample(vocabulary, 5, None, [None] * 4, [0.7, 0, 1.0, 1.0]),
        "sample cut": lambda: sampling._sample(vocabulary, 5, seen, [None] * 4, [0.7, 50, 0.9, 1.2]),
        "sample by row": lambda: sampling._sample(vocabulary, 5, None, [number, whole, number, number], [0.0] * 4),
        "sample narrow": lambda: sampling._sample(vocabulary[:, :100], 5, None, [None] * 4, [0.7, 5, 0.9, 1.0]),
        "moe_gate": lambda: moe_gate._moe_gate(gates, 8, True),
        "moe_gate all": lambda: moe_gate._moe_gate(gates, 8, False),
        "moe_gate widest": lambda: moe_gate._moe_gate(empty(64, 4096), 64, True),
        "moe_gate backward": lambda: moe_gate._moe_gate_backward(chosen, slots, gates, True),
        "moe_gate backward all": lambda: moe_gate._moe_gate_backward(chosen, slots, gates, False),
    }


def recorded(launch: Callable[[], Any]) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """The kernel that ``launch`` ends in, its arguments by name, and its compiler options."""
    calls: list[tuple[Any, dict[str, Any], dict[str, int]]] = []

    def recorder(kernel: Any) -> Callable[..., None]:
        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
            calls.append((kernel, named, options))

        return run

    for kernel in KERNELS:
        kernel.run = recorder(kernel)
    launch()
    (call,) = calls
    return call


def compiled(kernel: Any, arguments: dict[str, Any], options: dict[str, int]) -> Any:
    """Compile as Triton's launcher specialises: 1 is a constant, multiples of 16 and aligned pointers are known."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
            aligned = False
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def facts(result: Any) -> dict[str, Any]:
    """Registers per thread and bytes spilled (cuobjdump), bytes of shared memory, and what the PTX is made of."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr))
    ptx = result.asm["ptx"]
    return {
        "registers": int(found["REG"]),
        "spilled": int(found["STACK"]) + int(found["LOCAL"]),
        "shared": int(result.metadata.shared),
        "wgmma": ptx.count("wgmma.mma_async"),
        "tf32": ptx.count("tf32"),
        "vector_loads": len(re.findall(r"ld\.global\S*\.v4", ptx)),
        "copies": ptx.count("cp.async.c"),
    }


if __name__ == "__main__":
    chosen = getattr(torch, sys.argv[1])
    print(json.dumps({name: facts(compiled(*recorded(launch))) for name, launch in launches(chosen).items()}))
