"""Observes compiled Triton launches: the facts on a GPU that the interpreter gives on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pytest_fusion.interpreter.launch import Launch, goes_far


def _launch_of(kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Launch:
    bound = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    constants = {name: bound[name] for name in names if isinstance(bound.get(name), int | bool | float | str)}
    if callable(grid):
        grid = grid(bound)
    sizes = tuple(int(size) for size in grid) if isinstance(grid, tuple | list) else (int(grid),)
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return Launch(kernel.fn.__name__, (x, y, z), constants, far=goes_far(bound.values()))


@contextmanager
def observe_compiled(callback: Callable[[Launch], None], *, launch: bool = True) -> Iterator[None]:
    """Call ``callback`` with each compiled launch before it happens; does nothing where Triton was never imported.

    ``launch=False`` compiles each kernel into Triton's disk cache and does not run it.

    Touches ``triton.runtime.jit.JITFunction.run`` (same signature in 3.6.0, 3.7.1 and 3.9.0).
    """
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        yield
        return
    original = jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            callback(_launch_of(self, args, grid, kwargs))
        return original(self, *args, grid=grid, warmup=warmup or not launch, **kwargs)

    jit.JITFunction.run = run
    try:
        yield
    finally:
        jit.JITFunction.run = original


@contextmanager
def on_first_compilation(callback: Callable[[], None]) -> Iterator[None]:
    """Call ``callback`` once, after the first kernel that Triton's disk cache did not have.

    Touches ``triton.knobs.compilation.listener`` (3.4 and later; elsewhere the callback is never called).
    """
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    compilation = getattr(knobs, "compilation", None)
    if compilation is None or not hasattr(compilation, "listener"):
        yield
        return
    previous = compilation.listener
    called: list[bool] = []

    def listen(*, cache_hit: bool, **facts: Any) -> None:
        if previous is not None:
            previous(cache_hit=cache_hit, **facts)
        if not cache_hit and not called:
            called.append(True)
            callback()

    compilation.listener = listen
    try:
        yield
    finally:
        compilation.listener = previous


@contextmanager
def around_compilations(begins: Callable[[str], None], ends: Callable[[], None]) -> Iterator[None]:
    """Call ``begins`` with a kernel's name before it is compiled or fetched from the cache, ``ends`` afterwards.

    Touches ``triton.runtime.jit.JITFunction._do_compile`` (3.6.0, 3.7.1 and 3.9.0; elsewhere nothing is called).
    """
    jit = sys.modules.get("triton.runtime.jit")
    original = getattr(getattr(jit, "JITFunction", None), "_do_compile", None)
    if jit is None or original is None:
        yield
        return

    def compiling(self: Any, *args: Any, **kwargs: Any) -> Any:
        begins(str(getattr(self.fn, "__name__", "a kernel")))
        try:
            return original(self, *args, **kwargs)
        finally:
            ends()

    jit.JITFunction._do_compile = compiling
    try:
        yield
    finally:
        jit.JITFunction._do_compile = original
