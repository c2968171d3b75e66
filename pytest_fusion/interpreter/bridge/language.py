"""Make ``triton.language`` interpreted once for the process instead of anew for every launch.

Upstream replaces some 150 functions before each launch and puts them back after it, 1-3 ms a launch, and again at every
call of a device function. In interpreter mode nothing else ever calls them, so they stay replaced; names imported from
``triton.language`` directly work for the same reason. Must run after ``import triton`` and before user modules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge import semantics
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.compute.reductions import Reducer
from pytest_fusion.interpreter.control import batch
from pytest_fusion.interpreter.control.runtime import KernelRuntime
from pytest_fusion.interpreter.memory import hints


def patch(interpreter: Any, runtime: KernelRuntime) -> None:
    """Replace Triton's builtins, the tensor's Python protocol, ranges, reductions and libdevice."""
    tl = interpreter.tl
    core, semantic = tl.core, interpreter.interpreter_semantic
    scope = interpreter._LangPatchScope()
    _bind_builtins(tl, core, semantic)
    interpreter._patch_lang_tensor(core.tensor, scope)
    for language in (tl, core):
        interpreter._patch_lang_core(language, scope)
    core.dtype.to_ir = lambda self, builder: self
    # Compiled, a dtype that is given to a device function arrives as a constexpr, which has a `.value`.
    core.dtype.value = property(lambda self: self)
    _patch_tensor(core.tensor, interpreter.TensorHandle, core.block_type)
    _remember_shapes(core)
    semantics.quicken(interpreter)

    reducer = Reducer(tl, interpreter.TensorHandle)
    for language in (tl, core):
        if hasattr(language, "to_tensor"):  # triton 3.6.0 has it in `core` alone
            language.to_tensor = _made_of(language.to_tensor)
        language.reduce = reducer.reduce
        language.associative_scan = reducer.scan
        language.map_elementwise = reducer.map
        language.range = runtime.plain_iterate
        language.multiple_of = partial(hints.multiple_of, core.tensor)
        language.max_contiguous = partial(hints.max_contiguous, core.tensor)
        language.max_constancy = partial(hints.max_constancy, core.tensor)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    # Overflow checks cost three more operations for each integer one and end in an assertion that is off anyway,
    # except in a kernel with debug=True, for which ``launcher`` turns them on.
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
    for name, member in list(vars(core.tensor).items()):
        # `x.exp()` and its like are registered before they are marked as builtins; compiled code takes them so.
        if inspect.isfunction(member) and "_semantic" in inspect.signature(inspect.unwrap(member)).parameters:
            setattr(core.tensor, name, _with_semantic(member, semantic))
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

    interpreted.__dict__.pop("__triton_builtin__", None)
    return interpreted


def _made_of(to_tensor: Callable[..., Any]) -> Callable[..., Any]:
    """``to_tensor`` that also accepts the constant which an integer argument of 1 is (``launcher``)."""

    @functools.wraps(to_tensor)
    def made(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = to_tensor(x, *args, **kwargs)
        return type(found)(found.handle, found.type) if "to" in vars(found) else found

    return made


def _patch_tensor(tensor: Any, handle: Any, block_type: Any) -> None:
    def index(self: Any) -> int:
        return int(batch.agreed(self.handle.data, "a number that Python needs"))

    def truth(self: Any) -> bool:
        """The truth of a tensor in Triton's own code ("if other and other.type.is_block()"); kernels use ``branch``.

        Compiled, every tensor is true; upstream's interpreter takes a scalar's value.
        """
        data: Array = self.handle.data
        return bool(data.reshape(-1)[0]) if data.size == 1 else True

    def transposed(self: Any) -> Any:
        shape = [int(n) for n in self.shape]
        order = [0, *range(1, len(shape) - 1), len(shape), len(shape) - 1]
        data = np.transpose(self.handle.data, order)
        kind = block_type(self.dtype, [*shape[:-2], shape[-1], shape[-2]])
        return tensor(handle(data, self.handle.dtype, self.handle.attr), kind)

    def text(self: Any) -> str:
        data: Array = self.handle.data
        return str(data[0] if data.shape[0] == 1 else data)

    tensor.__index__ = index
    tensor.__int__ = index
    tensor.__bool__ = truth
    tensor.__repr__ = text
    tensor.__str__ = text
    tensor.T = property(transposed)


def _remember_shapes(core: Any) -> None:
    """Cache types and shapes: describing its result was half the cost of an operation."""
    upstream_block, upstream_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    # Each element type's block type has one shape object, and its id is looked up faster than its content.
    numbers: dict[int, tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple(getattr(n, "value", n) for n in shape))
        known = blocks.get(key)
        if known is None:
            upstream_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        else:
            vars(self).update(known)
            self.element_ty = element_ty

    def tensor(self: Any, handle: Any, type: Any) -> None:
        block = type.is_block()
        known = numbers.get(id(type.shape)) if block else shapes.get(())
        if known is None:
            key = tuple(type.shape) if block else ()
            known = shapes.get(key)
            if known is None:
                upstream_tensor(self, handle, type)
                known = shapes[key] = (self.shape, self.numel)
            if block and type.shape is blocks.get((type.element_ty.name, key), {}).get("shape"):
                numbers[id(type.shape)] = known
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = known

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
