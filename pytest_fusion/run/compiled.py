"""Observes compiled Triton launches: the facts on a GPU that the interpreter gives on a CPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pytest_fusion.interpreter.launch import Launch, goes_far
from pytest_fusion.interpreter.memory.memory_findings import Site
from pytest_fusion.interpreter.scoped import holding, replaced

# By hash of the compiled kernel.
_products: dict[str, list[Site]] = {}
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.MULTILINE)
# PTX of Ampere and Hopper names the type of each factor, that of Blackwell the kind of the product.
_LOCATION_OR_PRODUCT = re.compile(r"^\s*\.loc\s+(\d+\s+\d+)|mma\S*[.:](tf32)\b", re.MULTILINE)
_KERNEL = ("triton.runtime.jit", "JITFunction")


def _launch_of(kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Launch:
    defaults = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default}
    bound = {**defaults, **dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    constants = {name: bound[name] for name in names if isinstance(bound.get(name), int | bool | float | str)}
    if callable(grid):
        grid = grid(bound)
    sizes = tuple(int(size) for size in grid) if isinstance(grid, tuple | list) else (int(grid),)
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return Launch(kernel.fn.__name__, (x, y, z), constants, far=goes_far(bound.values()))


def observe_compiled(callback: Callable[[Launch], None], *, launch: bool = True) -> AbstractContextManager[None]:
    """Call ``callback`` with each compiled launch before it happens; does nothing before Triton is imported.
    ``launch=False`` only compiles each kernel into Triton's disk cache. Touches ``triton.runtime.jit.JITFunction.run``
    (same signature in 3.6.0, 3.7.1 and 3.9.0)."""

    def run(upstream: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        warmup = kwargs["warmup"]
        if not warmup:
            given = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
            callback(_launch_of(kernel, args, kwargs["grid"], given))
        return upstream(kernel, *args, **{**kwargs, "warmup": warmup or not launch})

    return replaced(*_KERNEL, "run", run)


def tf32_products(into: dict[Site, None]) -> AbstractContextManager[None]:
    """Collect the lines of TF32 products in launched kernels. Touches ``asm`` and ``hash`` of the result of ``run``."""

    def run(upstream: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = upstream(kernel, *args, **kwargs)
        known = str(getattr(result, "hash", ""))
        if known and known not in _products:
            _products[known] = products_in(str(result.asm.get("ptx", "")), str(kernel.fn.__name__))
        into.update(dict.fromkeys(_products.get(known, ())))
        return result

    return replaced(*_KERNEL, "run", run)


def products_in(ptx: str, kernel: str) -> list[Site]:
    """The source lines whose products the machine code computes in TF32."""
    files = dict(_FILE.findall(ptx))
    found: dict[Site, None] = {}
    at = Site(kernel, "", 0)
    for location, product in _LOCATION_OR_PRODUCT.findall(ptx):
        if product:
            found[at] = None
        else:
            number, line = location.split()[:2]
            at = Site(kernel, files.get(number, ""), int(line))
    return list(found)


def on_first_compilation(callback: Callable[[], None]) -> AbstractContextManager[None]:
    """Call ``callback`` once, after the first kernel that Triton's disk cache does not have; nothing before Triton's
    import. Touches ``triton.knobs.compilation.listener``."""
    compilation = getattr(getattr(sys.modules.get("triton"), "knobs", None), "compilation", None)
    if compilation is None:
        return nullcontext()
    previous = compilation.listener
    called: list[bool] = []

    def listen(*, cache_hit: bool, **facts: Any) -> None:
        if previous is not None:
            previous(cache_hit=cache_hit, **facts)
        if not cache_hit and not called:
            called.append(True)
            callback()

    return holding(compilation, listener=listen)


def around_compilations(begins: Callable[[str], None], ends: Callable[[], None]) -> AbstractContextManager[None]:
    """Call ``begins`` with a kernel's name before it is compiled or fetched from the cache, ``ends`` afterwards.
    Touches ``triton.runtime.jit.JITFunction._do_compile`` (3.6.0, 3.7.1 and 3.9.0; elsewhere nothing is called)."""

    def compiling(upstream: Callable[..., Any], kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begins(str(getattr(kernel.fn, "__name__", "a kernel")))
        try:
            return upstream(kernel, *args, **kwargs)
        finally:
            ends()

    return replaced(*_KERNEL, "_do_compile", compiling)


def timed_compilations(clock: Callable[[], float], took: Callable[[float], None]) -> AbstractContextManager[None]:
    """Call ``took`` after each compilation, or fetch from the cache, with the seconds that ``clock`` counted."""
    began = 0.0

    def begins(_kernel: str) -> None:
        nonlocal began
        began = clock()

    return around_compilations(begins, lambda: took(clock() - began))
