"""A modelled device for launchers that read the number of multiprocessors, on a machine without CUDA.

Launchers size their grids by ``torch.cuda.get_device_properties(x.device)`` or ``triton.runtime.driver.active``, which
raise without a device. While the CPU lane is on and ``torch.cuda.is_available()`` is false (it stays false), they
describe an H100 SXM: 132 multiprocessors of compute capability 9.0 (NVIDIA H100 whitepaper). Contexts that select a
device do nothing.

Checks model fewer multiprocessors for some cases: with 132 programs and tiles of 1024 elements none has a second
iteration below 135,169 elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from pytest_fusion.errors import NotModelledError
from pytest_fusion.interpreter.bridge.lane_state import installed
from pytest_fusion.interpreter.bridge.named_device import on_the_cpu

PROPERTIES: dict[str, Any] = {
    "name": "modelled sm_90 (Triton interpreter, no device)",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 80 * 2**30,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 50 * 2**20,
    "warp_size": 32,
    "is_integrated": 0,
    "is_multi_gpu_board": 0,
    "gcnArchName": "",
}


def _driver_properties(device: int) -> dict[str, Any]:
    """The same facts under the names of ``triton.runtime.driver.active.utils``, and the clocks of an H100 SXM."""
    return {
        "max_shared_mem": PROPERTIES["shared_memory_per_block_optin"],
        "max_num_regs": PROPERTIES["regs_per_multiprocessor"],
        "multiprocessor_count": PROPERTIES["multi_processor_count"],
        "warpSize": PROPERTIES["warp_size"],
        "sm_clock_rate": 1980000,
        "mem_clock_rate": 2619000,
        "mem_bus_width": 5120,
    }


def model(name: str, capability: tuple[int, int], *, multiprocessors: int, warps: int, shared: int, block: int) -> None:
    """Describe another device from now on; ``shared`` and ``block`` are bytes of a multiprocessor and of a block."""
    PROPERTIES.update(
        name=f"modelled {name} (no device)",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=multiprocessors,
        max_threads_per_multi_processor=32 * warps,
        shared_memory_per_block_optin=block,
        shared_memory_per_multiprocessor=shared,
    )


@contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """Within this block the modelled device reports ``count`` multiprocessors."""
    before = PROPERTIES["multi_processor_count"]
    PROPERTIES["multi_processor_count"] = count
    try:
        yield
    finally:
        PROPERTIES["multi_processor_count"] = before


class ModelledDriver:
    """Replaces ``triton.runtime.driver.active``; it launches and measures nothing."""

    utils = SimpleNamespace(get_device_properties=_driver_properties)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return (PROPERTIES["major"], PROPERTIES["minor"])

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", PROPERTIES["major"] * 10 + PROPERTIES["minor"], 32)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotModelledError("the modelled device compiles nothing")

    def get_benchmarker(self) -> Any:
        raise NotModelledError(
            "interpreted kernels have no latency worth measuring; benchmark on a GPU (--fusion-device cuda)"
        )


def model_driver(torch: Any) -> None:
    """Give Triton the modelled driver if there is no device. Triton's own probing would start CUDA."""
    from triton.runtime import driver

    if torch.cuda.device_count() == 0:
        driver.set_active(ModelledDriver())


def model_cuda(torch: Any) -> None:
    """Let ``torch.cuda`` describe the modelled device if there is no other."""
    cuda = torch.cuda
    if cuda.device_count() > 0 or getattr(cuda.get_device_properties, "modelled", False):
        return
    upstream_device = cuda.device

    class device(upstream_device):  # type: ignore[misc, valid-type]  # noqa: N801 - torch's name
        """``with torch.cuda.device(...)`` that selects nothing and accepts a CPU device."""

        def __init__(self, device: Any) -> None:
            self.idx = -1
            self.prev_idx = -1

    def get_device_properties(device: Any = None) -> Any:
        """The properties of the modelled device, whatever ``device`` is."""
        return SimpleNamespace(**PROPERTIES)

    get_device_properties.modelled = True  # type: ignore[attr-defined]
    stream = SimpleNamespace(
        cuda_stream=0, stream_id=0, device_index=0, synchronize=lambda: None, wait_stream=lambda other: None
    )
    cuda.device = device
    cuda.get_device_properties = get_device_properties
    cuda.get_device_capability = lambda device=None: (PROPERTIES["major"], PROPERTIES["minor"])
    cuda.get_device_name = lambda device=None: PROPERTIES["name"]
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.current_stream = lambda device=None: stream
    cuda.synchronize = lambda device=None: None


@contextmanager
def posing_as_cuda(torch: Any) -> Iterator[None]:
    """Make ``is_cuda`` true for CPU tensors: most launchers assert it. Does nothing where kernels are compiled."""
    if not installed() or torch.cuda.device_count() > 0:
        yield
        return
    nested = "is_cuda" in vars(torch.Tensor)
    if not nested:
        torch.Tensor.is_cuda = property(lambda tensor: True)
    try:
        with on_the_cpu():
            yield
    finally:
        if not nested:
            del torch.Tensor.is_cuda  # restores the base class's own property


def unwrap_triton_op(torch: Any) -> None:
    """Make ``wrap_triton`` return interpreted kernels, as outside tracing; torch rejects them (pytorch#152868)."""
    library = getattr(torch._library, "triton", None)
    if library is None or getattr(library.wrap_triton, "takes_interpreted", False):
        return
    upstream = library.wrap_triton

    def wrap_triton(triton_kernel: Any) -> Any:
        from triton.runtime.interpreter import InterpretedFunction

        inner = triton_kernel
        while inner is not None and not isinstance(inner, InterpretedFunction):
            inner = getattr(inner, "fn", None)
        return upstream(triton_kernel) if inner is None else triton_kernel

    wrap_triton.takes_interpreted = True  # type: ignore[attr-defined]
    for owner in (library, torch.library, torch._library):
        if getattr(owner, "wrap_triton", None) is upstream:
            owner.wrap_triton = wrap_triton
