"""Makes ``triton.language`` interpreted once for the process, after ``import triton`` and before user modules.

Upstream replaces some 150 functions before each launch and restores them after it, 1-3 ms a launch, and again at every
call of a device function. In interpreter mode only kernels call them, so they stay replaced, which also makes names
imported from ``triton.language`` work.

Checking and promoting operands took three quarters of a small launch. So shortcuts give the same results directly for
operands of one type, numbers that fit it, and a scalar with a block; the rest uses Triton's own code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.compute.reductions import Reducer
from pytest_fusion.interpreter.control import batch
from pytest_fusion.interpreter.control.batch import broadcast
from pytest_fusion.interpreter.control.runtime import KernelRuntime
from pytest_fusion.interpreter.memory import hints

# Types that promotion does not change if both operands, or a tensor and a number, have them.
_FLOATS = frozenset({"fp32"})
_INTEGERS = frozenset({"int32", "int64"})
_STEADY = _FLOATS | _INTEGERS
_INT32 = range(-(2**31), 2**31)
_MOST_CONSTANTS = 4096
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_HALVES = ("fp16", "bf16")
# The builder's method for each conversion that is one step of Triton's: half precision goes through float32.
_CONVERSIONS = {
    **{(a, b): "create_int_cast" for a in _WHOLE for b in _WHOLE if a != b},
    **{(a, b): "create_si_to_fp" for a in _WHOLE for b in ("fp32", "fp64") if a[0] == "i"},
    **{(a, "fp32"): "create_fp_ext" for a in _HALVES},
    **{("fp32", b): "create_fp_trunc" for b in _HALVES},
}


def quicken(interpreter: Any) -> None:
    """Replace type checking and broadcasting of ``TritonSemantic``, for the whole process."""
    semantic, tensor = interpreter.TritonSemantic, interpreter.tl.core.tensor
    upstream = semantic.binary_op_type_checking_impl
    block_types: dict[Any, Any] = {}
    constants: dict[Any, Any] = {}
    cast = semantic.cast = _quick_cast(interpreter, block_types)
    broadcast_impl_value = semantic.broadcast_impl_value = _quick_broadcast(interpreter, block_types)

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        # 0.0 and -0.0 are equal keys, but differ as text.
        key = (repr(value), dtype.name)
        found = constants.get(key)
        if found is None:
            found = self.scalar_constant(value, dtype=dtype)
            if len(constants) < _MOST_CONSTANTS:
                constants[key] = found
        return found

    def check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        left, right = type(lhs) is tensor, type(rhs) is tensor
        if left and right:
            a, b = lhs.dtype.name, rhs.dtype.name
            if a == b and (a in _STEADY or not (arithmetic_check or lhs.dtype.is_ptr())):
                return broadcast_impl_value(self, lhs, rhs)
            if b in _INTEGERS:
                if a in _INTEGERS and arithmetic_check:
                    wide = lhs.dtype if a == "int64" else rhs.dtype
                    return broadcast_impl_value(self, cast(self, lhs, wide), cast(self, rhs, wide))
                if allow_lhs_ptr and lhs.dtype.is_ptr():
                    return broadcast_impl_value(self, lhs, rhs)
        elif left and _fits(rhs, lhs.dtype.name):
            return broadcast_impl_value(self, lhs, constant(self, rhs, lhs.dtype))
        elif right and _fits(lhs, rhs.dtype.name):
            return broadcast_impl_value(self, constant(self, lhs, rhs.dtype), rhs)
        return upstream(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.binary_op_type_checking_impl = check


def _typed(block_types: dict[Any, Any], like: Any, scalar: Any) -> Any:
    """The type of a tensor with the shape of ``like`` and elements of type ``scalar``."""
    if not like.shape:
        return scalar
    key = (id(like.shape), scalar.name)
    kind = block_types.get(key)
    if kind is None:
        kind = block_types[key] = like.type.with_element_ty(scalar)
    return kind


def _quick_cast(interpreter: Any, block_types: dict[Any, Any]) -> Callable[..., Any]:
    upstream, tensor = interpreter.TritonSemantic.cast, interpreter.tl.core.tensor

    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if fp_downcast_rounding is None:
            source, target = input.dtype.name, dst_ty.scalar.name
            if source == target and not input.dtype.is_ptr():
                return input
            step = _CONVERSIONS.get((source, target))
            if step is not None:
                kind = _typed(block_types, input, dst_ty.scalar)
                return tensor(getattr(self.builder, step)(input.handle, kind), kind)
        return upstream(self, input, dst_ty, fp_downcast_rounding)

    return cast


def _quick_broadcast(interpreter: Any, block_types: dict[Any, Any]) -> Callable[..., Any]:
    upstream = interpreter.TritonSemantic.broadcast_impl_value
    tensor, handle = interpreter.tl.core.tensor, interpreter.TensorHandle
    common: dict[Any, Any] = {}

    def splat(scalar: Any, like: Any) -> Any:
        old, kind = scalar.handle, _typed(block_types, like, scalar.dtype)
        return tensor(handle(_spread(old.data, like.shape), old.dtype.scalar, old.attr), kind)

    def spread(block: Any, whole: tuple[int, ...]) -> Any:
        old, scalar = block.handle, block.dtype
        key = (whole, scalar.name)
        kind = block_types.get(key)
        if kind is None:
            kind = block_types[key] = interpreter.tl.block_type(scalar, list(whole))
        wide = broadcast(old.data, (old.data.shape[0], *whole))
        return tensor(handle(wide, old.dtype.scalar, old.attr), kind)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        # Equal shapes are one object (`language` makes each once), and scalars have the empty one.
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not rhs.shape:
            return lhs, splat(rhs, lhs)
        if not lhs.shape:
            return splat(lhs, rhs), rhs
        key = (id(lhs.shape), id(rhs.shape))
        sizes = common.get(key)
        if sizes is None:
            sizes = common[key] = _common(lhs.type.shape, rhs.type.shape)
        left, right, whole = sizes
        if whole is None:
            return upstream(self, lhs, rhs)
        return lhs if left == whole else spread(lhs, whole), rhs if right == whole else spread(rhs, whole)

    return broadcast_impl_value


def _common(left: Any, right: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Both shapes as numbers, and the shape that they broadcast to; ``None`` if they do not."""
    a, b = (tuple(int(getattr(n, "value", n)) for n in shape) for shape in (left, right))
    fits = len(a) == len(b) and all(m == n or 1 in (m, n) for m, n in zip(a, b, strict=True))
    return a, b, tuple(n if m == 1 else m for m, n in zip(a, b, strict=True)) if fits else None


def _fits(number: Any, name: str) -> bool:
    """Whether a Python number takes the tensor's type without promotion."""
    kind = type(number)
    if kind is int:
        return name in _STEADY and number in _INT32
    return kind is float and name in _FLOATS


def _spread(data: Array, shape: Any) -> Array:
    """A scalar (programs,) broadcast to a block of ``shape``, not copied."""
    whole = (data.shape[0], *(int(getattr(n, "value", n)) for n in shape))
    if data.dtype.kind == "V" or not data.flags.c_contiguous:  # numpy makes no views of ml_dtypes' types by buffer
        return np.broadcast_to(data.reshape(-1, *(1,) * (len(whole) - 1)), whole)
    return np.ndarray(whole, data.dtype, data, 0, (data.strides[0], *(0,) * (len(whole) - 1)))


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
    # Compiled, a dtype that is passed to a device function is a constexpr, which has a `.value`.
    core.dtype.value = property(lambda self: self)
    _patch_tensor(core.tensor, interpreter.TensorHandle, core.block_type)
    _remember_shapes(core)
    quicken(interpreter)

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
    # Overflow checks cost three more operations for each integer one and end in an assertion that is off anyway, except
    # in a kernel with debug=True, for which ``launcher`` turns them on.
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
        # `x.exp()` and the like are registered before they are marked as builtins; compiled code accepts them.
        if inspect.isfunction(member) and "_semantic" in inspect.signature(inspect.unwrap(member)).parameters:
            setattr(core.tensor, name, _with_semantic(member, semantic))
    for name, member in list(vars(libdevice).items()):
        # The portable module has bodies of `...`, which the compiler replaces by the target's functions.
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
    """``to_tensor`` that also accepts the constant for an integer argument of 1 (``launcher``)."""

    @functools.wraps(to_tensor)
    def made(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = to_tensor(x, *args, **kwargs)
        return type(found)(found.handle, found.type) if "to" in vars(found) else found

    return made


def _patch_tensor(tensor: Any, handle: Any, block_type: Any) -> None:
    def index(self: Any) -> int:
        return int(batch.agreed(self.handle.data, "a number that Python needs"))

    def truth(self: Any) -> bool:
        """The truth of a tensor in Triton's own code: compiled, all are true; interpreted, a scalar's value counts."""
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
    # Each element type's block type has one shape object, whose id is a faster key than its content.
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
