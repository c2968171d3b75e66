"""Interpreted kernels that pass for ``triton.runtime.JITFunction``, for packages that take nothing else.

FlagGems launches through ``LibEntry``, which asks ``isinstance(kernel, triton.runtime.JITFunction)`` while it is being
imported, reads ``params``, ``src`` and ``cache_key``, and keeps what the first launch returns to launch it again. Under
``TRITON_INTERPRET=1`` the decorator makes an ``InterpretedFunction``, which has none of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def passing_for_jit_functions(torch: Any) -> Iterator[None]:
    """From here on ``@triton.jit`` makes both; inside one CUDA device is counted, as ``LibEntry`` has a cache for each.

    There is no way back: FlagGems writes and decorates its pointwise kernels when they are first called.
    """
    from triton.runtime import interpreter, jit

    upstream, count = interpreter.InterpretedFunction, torch.cuda.device_count

    class Again:
        """What a launch returns: the same kernel with the same compile-time arguments."""

        def __init__(self, kernel: Any, constexprs: dict[str, Any]) -> None:
            self._kernel = kernel
            self._constexprs = constexprs

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*values: Any) -> None:
                params = self._kernel.params
                names = [p.name for p in params if len(values) == len(params) or not p.is_constexpr]
                given = dict(zip(names, values, strict=False))  # trailing defaults may be left out
                self._kernel.run(grid=grid, **{**self._constexprs, **given})

            return launch

    class Kernel(upstream, jit.JITFunction):  # type: ignore[misc, valid-type]
        def __init__(self, fn: Any, **kwargs: Any) -> None:
            upstream.__init__(self, fn, **kwargs)
            known = jit.JITFunction(fn, **kwargs)
            self.params, self.signature, self._src = known.params, known.signature, known.src
            self.__globals__, self.__module__, self.__doc__ = fn.__globals__, fn.__module__, fn.__doc__

        @property
        def src(self) -> str:
            return str(self._src)

        @property
        def cache_key(self) -> str:
            return hashlib.sha256(self._src.encode()).hexdigest()

        def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
            super().run(*args, grid=grid, warmup=warmup, **kwargs)
            bound = self.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in self.signature.parameters})
            bound.apply_defaults()
            return Again(self, {p.name: bound.arguments[p.name] for p in self.params if p.is_constexpr})

    interpreter.InterpretedFunction = Kernel
    torch.cuda.device_count = lambda: 1
    try:
        yield
    finally:
        torch.cuda.device_count = count
