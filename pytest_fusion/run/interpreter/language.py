"""Make ``triton.language`` interpreted once for the process instead of anew for every launch.

Upstream replaces some 150 functions before each launch and puts them back after it, 1-3 ms a launch, and again at every
call of a device function. In interpreter mode nothing else ever calls them, so they stay replaced; names imported from
``triton.language`` directly work for the same reason. Must run after ``import triton`` and before user modules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from pytest_fusion.run.interpreter.dtypes import Array
from pytest_fusion.run.interpreter.reductions import Reducer, truth
from pytest_fusion.run.interpreter.rewrite import Helper


def patch(interpreter: Any, helper: Helper) -> None:
    """Replace Triton's builtins, the tensor's Python protocol, ranges, reductions and libdevice."""
    tl = interpreter.tl
    core, semantic = tl.core, interpreter.interpreter_semantic
    scope = interpreter._LangPatchScope()
    _bind_builtins(tl, core, semantic)
    interpreter._patch_lang_tensor(core.tensor, scope)
    for language in (tl, core):
        interpreter._patch_lang_core(language, scope)
    core.dtype.to_ir = lambda self, builder: self
    _patch_tensor(core.tensor)

    reducer = Reducer(tl, interpreter.TensorHandle)
    for language in (tl, core):
        language.reduce = reducer.reduce
        language.associative_scan = reducer.scan
        language.range = helper.iterate
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    # Overflow checks cost three more operations for each integer one and end in an assertion that is off anyway,
    # unless a kernel is compiled with debug=True, which ``launches`` turns on for it.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _bind_builtins(tl: Any, core: Any, semantic: Any) -> None:
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as cuda_libdevice

    bound: dict[int, Callable[..., Any]] = {}

    def bind(owner: Any) -> None:
        for name, member in list(vars(owner).items()):
            if not core.is_builtin(member):
                continue
            if id(member) not in bound:
                bound[id(member)] = _with_semantic(member, semantic)
            setattr(owner, name, bound[id(member)])

    classes = {c for c in vars(core).values() if inspect.isclass(c) and c.__module__ == core.__name__}
    for owner in (tl, core, tl.math, *classes, tl.extra.cuda, cuda_libdevice):
        bind(owner)
    for name, member in list(vars(libdevice).items()):
        # The portable module holds bodies of `...`, which the compiler swaps for the target's functions.
        if inspect.isfunction(member) and hasattr(cuda_libdevice, name):
            setattr(libdevice, name, getattr(cuda_libdevice, name))


def _with_semantic(member: Callable[..., Any], semantic: Any) -> Callable[..., Any]:
    inner = getattr(member, "__wrapped__", member)

    @functools.wraps(member)
    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    del interpreted.__dict__["__triton_builtin__"]
    return interpreted


def _patch_tensor(tensor: Any) -> None:
    def data(self: Any) -> Array:
        result: Array = self.handle.data
        return result

    # int() of a one-element array of rank 1 is an error from numpy 2.4 on, which breaks range() on Triton 3.6.
    tensor.__index__ = lambda self: int(data(self).reshape(-1)[0])
    tensor.__int__ = tensor.__index__
    tensor.__bool__ = lambda self: truth(data(self))
