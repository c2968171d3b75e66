"""Put the mended numerics into Triton's ``InterpreterBuilder``: glue between handles and plain arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pytest_fusion.run.interpreter import arith, libdevice
from pytest_fusion.run.interpreter.casts import convert
from pytest_fusion.run.interpreter.dtypes import Array, is_float, numpy_dtype, poison
from pytest_fusion.run.interpreter.memory_ops import Memory
from pytest_fusion.run.interpreter.observers import note
from pytest_fusion.run.interpreter.scaled_dot import scaled_operand

_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "LT": np.less,
    "GT": np.greater,
    "LE": np.less_equal,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}

_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": arith.binary(np.add),
    "sub": arith.binary(np.subtract),
    "mul": arith.binary(np.multiply),
    "sdiv": arith.int_divide,
    "udiv": arith.int_divide,
    "srem": arith.int_remainder,
    "urem": arith.int_remainder,
    "ashr": arith.shift_right_arithmetic,
    "umulhi": arith.multiply_high,
    "minnumf": np.fmin,
    "maxnumf": np.fmax,
    "minimumf": np.minimum,
    "maximumf": np.maximum,
    **{f"fcmp{order}{how}": function for order in "OU" for how, function in _COMPARE.items()},
    **{f"icmp{order}{how}": function for order in "SU" for how, function in _COMPARE.items()},
    "icmpEQ": np.equal,
    "icmpNE": np.not_equal,
    "fadd": np.add,
    "fsub": np.subtract,
    "fmul": np.multiply,
    "fdiv": np.divide,
    "frem": np.fmod,
    "precise_divf": np.divide,
    "approx_divf": np.divide,
}

_UNARY: dict[str, Callable[[Array], Array]] = {
    "erf": arith.erf,
    "rsqrt": arith.rsqrt,
    "fabs": np.abs,
    "fneg": np.negative,
}


def mend(interpreter: Any) -> None:
    """Replace the operators of ``triton.runtime.interpreter`` that compute wrongly, for the whole process."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    interpreter._get_np_dtype = numpy_dtype

    # The comparisons keep the operand's type on the handle, as upstream: the semantic layer attaches int1 itself.
    def binary(function: Callable[[Array, Array], Array]) -> Callable[..., Any]:
        def apply(self: Any, lhs: Any, rhs: Any) -> Any:
            left, right = lhs.data, rhs.data
            if left.dtype != right.dtype:
                # Some handles hold their bits with the other signedness; numpy would widen the two to 64 bits.
                left, right = left.astype(numpy_dtype(lhs.dtype)), right.astype(numpy_dtype(rhs.dtype))
            return handle(function(left, right), lhs.dtype.scalar)

        return apply

    def unary(function: Callable[[Array], Array]) -> Callable[..., Any]:
        return lambda self, arg: handle(function(arg.data), arg.dtype.scalar)

    for name, function in _BINARY.items():
        setattr(builder, f"create_{name}", binary(function))
    for name, unary_function in _UNARY.items():
        setattr(builder, f"create_{name}", unary(unary_function))
    _mend_casts(builder, handle, interpreter._ir)
    _mend_compound(builder, handle, interpreter._ir)
    _accept_plain_formats(interpreter.TritonSemantic)
    _mend_memory(interpreter, Memory(interpreter._interpreter))
    _mend_atomics(interpreter, Memory(interpreter._interpreter))
    _refuse(builder)


def _mend_casts(builder: Any, handle: Any, ir: Any) -> None:
    def cast(self: Any, src: Any, dst_type: Any, *_: Any) -> Any:
        return handle(convert(src.data, numpy_dtype(dst_type)), dst_type.scalar)

    def fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        toward_zero = rounding == ir.ROUNDING_MODE.RTZ
        return handle(convert(src.data, numpy_dtype(dst_type), toward_zero=toward_zero), dst_type.scalar)

    def bitcast(self: Any, src: Any, dst_type: Any) -> Any:
        return handle(np.ascontiguousarray(src.data).view(numpy_dtype(dst_type)), dst_type.scalar)

    builder.cast_impl = cast
    for name in "si_to_fp ui_to_fp fp_to_si fp_to_ui fp_ext fp_trunc int_cast".split():
        setattr(builder, f"create_{name}", cast)
    builder.create_fp_to_fp = fp_to_fp
    for name in "bitcast int_to_ptr ptr_to_int".split():
        setattr(builder, f"create_{name}", bitcast)
    # 3.6 and 3.7 lack the constant that tl.full(..., tl.bfloat16) asks for.
    builder.get_bf16 = lambda self, value: cast(self, self.get_fp32(value), self.get_bf16_ty())


def _mend_compound(builder: Any, handle: Any, ir: Any) -> None:
    def clamp(self: Any, arg: Any, lo: Any, hi: Any, propagate: Any) -> Any:
        propagate_nan = propagate != ir.PROPAGATE_NAN.NONE
        return handle(arith.clamp(arg.data, lo.data, hi.data, propagate_nan=propagate_nan), arg.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return handle(arith.fused_multiply_add(x.data, y.data, z.data), z.dtype.scalar)

    def select(self: Any, condition: Any, lhs: Any, rhs: Any) -> Any:
        dtype = numpy_dtype(rhs.dtype)
        chosen = np.where(condition.data, lhs.data.astype(dtype, copy=False), rhs.data.astype(dtype, copy=False))
        return handle(chosen, rhs.dtype.scalar)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, max_imprecise: Any) -> Any:
        if a.data.dtype == np.float32 and precision != ir.INPUT_PRECISION.IEEE:
            note("tl.dot of float32 with tf32 inputs was computed in full float32: the GPU keeps 10 mantissa bits")
        return handle(arith.dot(a.data, b.data, d.data), d.dtype.scalar)

    def histogram(self: Any, data: Any, bins: int, mask: Any) -> Any:
        counted = arith.histogram(data.data, None if mask is None else mask.data, bins)
        return handle(counted, self.get_int32_ty())

    def all_ones(self: Any, type: Any) -> Any:
        return handle(arith.all_ones(numpy_dtype(type)), type.scalar)

    def extern(self: Any, library: str, path: str, symbol: str, arguments: Any, returns: Any, pure: bool) -> Any:
        data = libdevice.call(symbol, [a.data for a in arguments], numpy_dtype(returns))
        return handle(data, returns.scalar)

    def dot_scaled(
        self: Any, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any, *rest: Any
    ) -> Any:
        _, lhs_k_pack, rhs_k_pack, accumulator = rest
        packed = ir.ScaleDotElemTypeTY.E2M1
        operands = [
            scaled_operand(
                value.data, None if scale is None else scale.data, packed=kind == packed, along_k=along_k, right=right
            )
            for value, scale, kind, along_k, right in (
                (lhs, lhs_scale, lhs_format, lhs_k_pack, False),
                (rhs, rhs_scale, rhs_format, rhs_k_pack, True),
            )
        ]
        return handle(arith.dot(operands[0], operands[1], accumulator.data), accumulator.dtype.scalar)

    builder.create_dot_scaled = dot_scaled
    builder.create_clampf = clamp
    builder.create_fma = fma
    builder.create_select = select
    builder.create_dot = dot
    builder.create_histogram = histogram
    builder.get_all_ones_value = all_ones
    builder.create_extern_elementwise = extern


class _Format(str):
    """A format name of ``tl.dot_scaled`` that is its own ``.value``."""

    __slots__ = ()

    @property
    def value(self) -> str:
        return str(self)


def _accept_plain_formats(semantic: Any) -> None:
    """3.6 and 3.7 ask the format for ``.value``, which only the compiler's constants have."""
    upstream = semantic.dot_scaled

    def dot_scaled(self: Any, *args: Any, **named: Any) -> Any:
        return upstream(self, *(_Format(a) if isinstance(a, str) else a for a in args), **named)

    semantic.dot_scaled = dot_scaled


def _array(mask: Any) -> Array:
    """Masks come as bare arrays from block pointers (3.6, 3.7), else as handles."""
    return mask if isinstance(mask, np.ndarray) else np.asarray(mask.data)


def _mend_memory(interpreter: Any, memory: Memory) -> None:
    builder, handle, ir = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter._ir
    semantic = interpreter.TritonSemantic
    upstream_load = semantic.load
    other_given = [False]

    def semantic_load(self: Any, ptr: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        # Upstream passes `other.handle if other else None`: a scalar `other` of zero is lost on the way.
        other_given[0] = other is not None
        try:
            return upstream_load(self, ptr, mask, other, *rest, **named)
        finally:
            other_given[0] = False

    def load(self: Any, ptr: Any, *_: Any) -> Any:
        pointee = ptr.get_element_ty()
        return handle(memory.load(ptr.data, numpy_dtype(pointee)), pointee)

    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any) -> Any:
        pointee = ptrs.get_element_ty()
        dtype = numpy_dtype(pointee)
        if other is not None:
            rest = other.data
        else:
            rest = np.zeros(1, dtype) if other_given[0] else None
        return handle(memory.load(ptrs.data, dtype, _array(mask), rest), pointee)

    def store(self: Any, ptr: Any, value: Any, *_: Any) -> None:
        memory.store(ptr.data, value.data)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        memory.store(ptrs.data, value.data, _array(mask))

    def padded(dtype: np.dtype[Any], padding: Any) -> Array:
        """Out of a block's bounds: NaN when asked, else zero, which is what NVIDIA's code generator loads today.

        Block pointers without padding are left at zero rather than poisoned: whole libraries (flash-linear-attention)
        load so and multiply at once.
        """
        if padding == ir.PADDING_OPTION.PAD_NAN and is_float(dtype):
            return np.full(1, poison(dtype), dtype)
        return np.zeros(1, dtype)

    def block_load(self: Any, ptr: Any, boundary_check: Any, padding: Any, *_: Any) -> Any:
        ptrs, masks = ptr.materialize_pointers(boundary_check)
        pointee = ptrs.get_element_ty()
        dtype = numpy_dtype(pointee)
        return handle(memory.load(ptrs.data, dtype, masks, padded(dtype, padding)), pointee)

    def block_store(self: Any, ptr: Any, value: Any, boundary_check: Any, *_: Any) -> None:
        ptrs, masks = ptr.materialize_pointers(boundary_check)
        memory.store(ptrs.data, value.data, masks)

    def descriptor_load(self: Any, desc: Any, indices: Any, *_: Any) -> Any:
        ptrs, mask = desc.materialize_pointers(indices)
        pointee = ptrs.get_element_ty()
        dtype = numpy_dtype(pointee)
        loaded = handle(memory.load(ptrs.data, dtype, _array(mask), padded(dtype, desc.padding)), pointee)
        if getattr(desc, "round_f32_to_tf32", False) and dtype == np.float32:
            loaded = handle(interpreter._round_f32_to_tf32(loaded.data), pointee)
        return loaded

    semantic.load = semantic_load
    builder.create_load = load
    builder.create_masked_load = masked_load
    builder.create_store = store
    builder.create_masked_store = masked_store
    builder.create_descriptor_load = descriptor_load
    if hasattr(builder, "create_tensor_pointer_load"):
        builder.create_tensor_pointer_load = block_load
        builder.create_tensor_pointer_store = block_store


def _mend_atomics(interpreter: Any, memory: Memory) -> None:
    builder, handle, ir = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter._ir
    upstream_rmw, upstream_cas = builder.create_atomic_rmw, builder.create_atomic_cas
    functions: dict[Any, Callable[[Array, Array], Array]] = {
        ir.ATOMIC_OP.FADD: np.add,
        ir.ATOMIC_OP.ADD: np.add,
        ir.ATOMIC_OP.MAX: np.fmax,
        ir.ATOMIC_OP.MIN: np.fmin,
        ir.ATOMIC_OP.XCHG: lambda old, new: new,
    }

    def rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        # Upstream's C++ has neither 16-bit floats nor the exchange of a float of any width.
        floating = is_float(val.data.dtype)
        if not floating or (val.data.dtype.itemsize > 2 and operation != ir.ATOMIC_OP.XCHG):
            found = upstream_rmw(self, operation, ptr, val, mask, sem, scope)
            return handle(found.data.view(numpy_dtype(val.dtype)), val.dtype.scalar)
        if operation not in functions:
            raise NotImplementedError(f"atomic {operation} on {val.dtype}: no GPU has it either")
        found = memory.update(functions[operation], ptr.data, val.data, mask.data)
        return handle(found, val.dtype.scalar)

    def cas(self: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        if not is_float(val.data.dtype) and val.data.dtype.itemsize > 2:
            return upstream_cas(self, ptr, cmp, val, sem, scope)
        pointers, expected, values = np.broadcast_arrays(ptr.data, cmp.data, val.data)
        return handle(memory.exchange_if_equal(pointers, expected, values), cmp.dtype.scalar)

    builder.create_atomic_rmw = rmw
    builder.create_atomic_cas = cas


def _refuse(builder: Any) -> None:
    def inline_asm(self: Any, assembly: str, *_: Any) -> Any:
        raise NotImplementedError(
            f"inline assembly ({assembly.strip().splitlines()[0][:60]!r}) cannot run on the CPU lane, which has no "
            "model of PTX. Test this kernel on a GPU (--fusion-device cuda)"
        )

    builder.create_inline_asm = inline_asm
