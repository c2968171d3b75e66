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
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels import launched_products, launched_rows

KERNELS = (*launched_products.KERNELS, *launched_rows.KERNELS)
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
}


def launches(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Representative launches by name; the memory is never touched, so sizes cost nothing."""

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind)

    return launched_products.launches(empty) | launched_rows.launches(empty)


def recorded(launch: Callable[[], Any]) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """The kernels that ``launch`` ends in, their arguments by name, and their compiler options."""
    calls: list[tuple[Any, dict[str, Any], dict[str, int]]] = []

    def recorder(kernel: Any) -> Callable[..., None]:
        def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            options = {name: named.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in named}
            calls.append((kernel, named, options))

        return run

    for kernel in KERNELS:
        kernel.run = recorder(kernel)
    launch()
    assert calls, "nothing was launched"
    return calls


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
        if isinstance(value, TensorDescriptor):
            element = POINTERS[value.base.dtype].removeprefix("*")
            signature[parameter.name] = f"tensordesc<{element}{list(value.block_shape)}>"
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
    # One thread asks for a copy, and besides only where there is something to do with it: two conditions, not one.
    asking = re.findall(r"@(%p\d+) mbarrier\.arrive\.expect_tx", ptx)
    both = set(re.findall(r"and\.pred\s+(%p\d+),", ptx))
    return {
        "registers": int(found["REG"]),
        "spilled": int(found["STACK"]) + int(found["LOCAL"]),
        "shared": int(result.metadata.shared),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tf32": ptx.count("tf32"),
        "vector_loads": len(re.findall(r"ld\.global\S*\.v4", ptx)),
        "paired_loads": len(re.findall(r"ld\.global\S*\.v2", ptx)),
        "copies": len(re.findall(r"cp\.async\.(?:c|bulk\.tensor)", ptx)),
        "unasked_copies": sum(predicate not in both for predicate in asking),
        "layouts": sorted(re.findall(r"= (#ttg\.blocked<.*>)", result.asm["ttgir"])),
    }


if __name__ == "__main__":
    chosen = getattr(torch, sys.argv[1])
    found = {
        f"{name} {number}" if number else name: facts(compiled(*call))
        for name, launch in launches(chosen).items()
        for number, call in enumerate(recorded(launch))
    }
    print(json.dumps(found))
