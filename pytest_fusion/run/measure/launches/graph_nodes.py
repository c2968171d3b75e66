"""The nodes of a captured CUDA graph: what one call launches on a GPU, without a profiler and without timing.

Reads them by the driver's functions through ctypes. The runtime's cannot name kernels of other libraries
(Paddle#58310), ``CUDAGraph.get_graph_data`` needs torch 2.13 and driver 13.1, and ``cuda.bindings`` may be missing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_fusion.run import capture
from pytest_fusion.run.measure.launches.launch_count import Counts, Uncounted, named
from pytest_fusion.spec.wording import first_line

# CUgraphNodeType of cuda.h, 11.0 to 13.1.
KERNEL, MEMCPY, MEMSET, CHILD, CONDITIONAL = 0, 1, 2, 4, 13


class UncountableError(Exception):
    """A node may run any number of kernels."""


def captured(
    call: Callable[[], Any], device: torch.device, *, prepare: Callable[[], None] | None = None
) -> Counts | Uncounted:
    """Capture one call on a CUDA device after three warm-up calls, and count the graph's nodes. ``prepare`` runs
    uncounted before each. Misses streams that do not wait for this one. Raises warm-up errors."""
    try:
        graph, result = capture.captured(lambda _: call(), device, prepare=prepare, keep=True)
    except capture.CaptureFailed as error:
        return Uncounted(f"the call cannot be captured in a CUDA graph: {first_line(error)[:200]}")
    del result
    try:
        return counts_of(walk(_driver(), int(graph.raw_cuda_graph())))
    except (UncountableError, OSError, AttributeError) as error:
        return Uncounted(f"the captured graph cannot be read: {first_line(error)}")
    finally:
        graph.reset()


def walk(driver: _Driver, graph: int) -> Iterator[tuple[int, str]]:
    """The type of each node that does something, child graphs included, and a kernel's name."""
    for node in driver.nodes(graph):
        kind = driver.kind(node)
        if kind == CHILD:
            yield from walk(driver, driver.child(node))
        elif kind == CONDITIONAL:
            raise UncountableError("it has a conditional node, whose body runs as often as the device decides")
        elif kind == KERNEL:
            yield kind, driver.name(node)
        elif kind in (MEMCPY, MEMSET):
            yield kind, ""


def counts_of(nodes: Iterator[tuple[int, str]]) -> Counts:
    """The nodes, counted by type."""
    found = list(nodes)
    kinds = [kind for kind, _ in found]
    names = named(readable(name) for kind, name in found if kind == KERNEL)
    return Counts(kinds.count(KERNEL), kinds.count(MEMCPY), kinds.count(MEMSET), names, "graph")


def readable(name: str) -> str:
    """A kernel's name without return type and parameters, demangled."""
    # The demangler reads any other name as a type: "a" as "signed char".
    name = (str(torch._C._demangle(name)) if name.startswith("_Z") else name).removeprefix("void ")
    if not name.endswith(")"):
        return name
    depth = 0
    for position in range(len(name) - 1, -1, -1):
        depth += (name[position] == ")") - (name[position] == "(")
        if depth == 0:
            return name[:position] or name
    return name


class _KernelParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2`` of cuda.h, 12.0 and later."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        *((f"{kind}_{axis}", ctypes.c_uint) for kind in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Driver:
    """The functions of libcuda on handles of graphs and nodes. Raises ``UncountableError`` if one fails."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def nodes(self, graph: int) -> list[int]:
        """The nodes of a graph, without those of its children."""
        count = ctypes.c_size_t()
        self._call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
        found = (ctypes.c_void_p * count.value)()
        if count.value:
            self._call("cuGraphGetNodes", ctypes.c_void_p(graph), found, ctypes.byref(count))
        return [int(node or 0) for node in found]

    def kind(self, node: int) -> int:
        kind = ctypes.c_int()
        self._call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        return kind.value

    def child(self, node: int) -> int:
        """The graph inside a node of type ``CHILD``."""
        graph = ctypes.c_void_p()
        self._call("cuGraphChildGraphNodeGetGraph", ctypes.c_void_p(node), ctypes.byref(graph))
        return int(graph.value or 0)

    def name(self, node: int) -> str:
        params, text = _KernelParams(), ctypes.c_char_p()
        self._call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(params))
        for handle, function in ((params.func, "cuFuncGetName"), (params.kern, "cuKernelGetName")):
            if not handle:
                continue
            try:
                self._call(function, ctypes.byref(text), ctypes.c_void_p(handle))
            except (UncountableError, AttributeError):  # a driver before 12.3, or the other kind of handle
                continue
            return (text.value or b"").decode(errors="replace") or "unnamed"
        return "unnamed"

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise UncountableError(f"{name} returned {status}")


_driver = functools.cache(_Driver)
