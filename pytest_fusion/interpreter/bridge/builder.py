"""Puts the corrected arithmetic into Triton's ``InterpreterBuilder``: converts between handles and plain arrays.

Arrays have the program axis first (``batch``); operands differ in rank only if one is a scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import numpy as np

from pytest_fusion.errors import NotModelledError
from pytest_fusion.interpreter.bridge.builder_memory import patch_memory
from pytest_fusion.interpreter.bridge.builder_shapes import create, patch_shapes
from pytest_fusion.interpreter.bridge.lane_state import note, product_rounded
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, numpy_dtype
from pytest_fusion.interpreter.compute import arith, libdevice
from pytest_fusion.interpreter.compute.casts import convert, scaled_operand
from pytest_fusion.interpreter.control import batch, tape
from pytest_fusion.interpreter.control.batch import aligned, lanes
from pytest_fusion.interpreter.memory import memory_findings
from pytest_fusion.interpreter.memory.hints import WRAPPED, Unwrapped
from pytest_fusion.interpreter.memory.regions import joined

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
    **dict.fromkeys(("sdiv", "udiv"), arith.int_divide),
    **dict.fromkeys(("srem", "urem"), arith.int_remainder),
    "ashr": arith.shift_right_arithmetic,
    "shl": np.left_shift,
    "lshr": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    **dict.fromkeys(("minsi", "minui"), np.minimum),
    **dict.fromkeys(("maxsi", "maxui"), np.maximum),
    "umulhi": arith.multiply_high,
    "minnumf": arith.min_number,
    "maxnumf": arith.max_number,
    "minimumf": arith.minimum,
    "maximumf": arith.maximum,
    **{f"fcmp{order}{how}": function for order in "OU" for how, function in _COMPARE.items()},
    **{f"icmp{order}{how}": function for order in "SU" for how, function in _COMPARE.items()},
    "icmpEQ": np.equal,
    "icmpNE": np.not_equal,
    "fadd": np.add,
    "fsub": np.subtract,
    "fmul": np.multiply,
    **dict.fromkeys(("fdiv", "precise_divf", "approx_divf"), np.divide),
    "frem": np.fmod,
}

# Bits of a float32 factor that tl.dot uses: one or two pieces of tf32, two of bfloat16. Three of bfloat16 are all bits.
_MANTISSA_BITS = {"TF32": 10, "TF32x3": 21, "BF16x3": 15}

# Programmatic dependent launch: a grid waits for the one before it, which here has always ended.
_ORDER_OF_GRIDS = frozenset({"griddepcontrol.wait", "griddepcontrol.launch_dependents"})

# Operations that wrap or clamp indices, and how many of their operands are indices.
_WRAPPING = {"srem": 1, "urem": 1, "minsi": 2, "minui": 2, "maxsi": 2, "maxui": 2}

_UNARY: dict[str, Callable[[Array], Array]] = {
    **{name: getattr(np, name) for name in "cos sin exp exp2 log log2 sqrt floor ceil".split()},
    "precise_sqrt": np.sqrt,
    **dict.fromkeys(("iabs", "fabs"), np.abs),
    "erf": arith.erf,
    "rsqrt": arith.rsqrt,
    "fneg": np.negative,
}


def patch(interpreter: Any) -> None:
    """Replace the operators of ``triton.runtime.interpreter`` that compute wrongly, for the whole process."""
    builder, handle, int1 = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl.int1
    interpreter._get_np_dtype = numpy_dtype
    # Upstream checks each new handle's item size, which only a bug of the interpreter itself could break.
    handle.__post_init__ = lambda self: None

    def binary(function: Callable[[Array, Array], Array]) -> Callable[..., Any]:
        def apply(self: Any, lhs: Any, rhs: Any) -> Any:
            left, right = lhs.data, rhs.data
            if left.dtype != right.dtype:
                # Some handles hold their bits with the other signedness; numpy would widen the two to 64 bits.
                left, right = left.astype(numpy_dtype(lhs.dtype)), right.astype(numpy_dtype(rhs.dtype))
            if left.ndim != right.ndim:
                left, right = aligned(left, right)
            result = function(left, right)
            return handle(result, int1 if result.dtype == np.bool_ else lhs.dtype.scalar)

        return apply

    def unary(function: Callable[[Array], Array]) -> Callable[..., Any]:
        return lambda self, arg: handle(function(arg.data), arg.dtype.scalar)

    def wrapping(apply: Callable[..., Any], operands: int) -> Callable[..., Any]:
        def wrapped(self: Any, lhs: Any, rhs: Any) -> Any:
            result = apply(self, lhs, rhs)
            result.attr = {WRAPPED: Unwrapped((lhs.data, rhs.data)[:operands])}
            return result

        return wrapped

    for name, function in _BINARY.items():
        apply = binary(function)
        setattr(builder, f"create_{name}", wrapping(apply, _WRAPPING[name]) if name in _WRAPPING else apply)
    for name, unary_function in _UNARY.items():
        setattr(builder, f"create_{name}", unary(unary_function))
    _patch_casts(builder, handle, interpreter._ir)
    _patch_compound(builder, handle, interpreter._ir)
    _accept_plain_formats(interpreter.TritonSemantic)
    _patch_programs(builder, handle, interpreter.tl)
    patch_shapes(builder, handle)
    patch_memory(interpreter)
    _refuse(builder, handle)


def _patch_programs(builder: Any, handle: Any, tl: Any) -> None:
    """Replace program ids, prints, asserts and barriers."""

    def program_id(self: Any, axis: int) -> Any:
        return handle(batch.current.programs[axis].astype(np.int32), tl.int32)

    def print_values(self: Any, prefix: str, hex: bool, values: Any, is_signed: Any) -> None:
        tape.spoil()
        now = batch.current
        for row in range(now.count):
            if now.active is not None and not now.active[row]:
                continue
            x, y, z = (int(n) for n in now.programs[:, row])
            start = f"({x}, {y}, {z})" + (f" {prefix}" if prefix else "")
            for value in values:
                shown = value.data[row if value.data.shape[0] > 1 else 0]
                with np.printoptions(formatter={"all": "0x{:02x}".format} if hex else None):
                    print(f"{start} {np.atleast_1d(shown)}")
            if not values:
                print(start)

    def require(condition: Any, message: str) -> None:
        if not bool(batch.current.of_active(np.asarray(condition.data)).all()):
            raise AssertionError(message)

    builder.create_get_program_id = program_id
    builder.create_print = print_values
    builder.create_assert = lambda self, condition, message: require(condition, f"{message}")
    builder.create_assume = lambda self, condition: require(condition, "the condition of tl.assume is false")
    builder.create_barrier = lambda self: None
    for name in ("create_grid_dependency_wait", "create_grid_dependency_launch_dependents"):
        setattr(builder, name, lambda self, *_: None)


def _patch_casts(builder: Any, handle: Any, ir: Any) -> None:
    def cast(self: Any, src: Any, dst_type: Any, *_: Any) -> Any:
        return handle(convert(src.data, numpy_dtype(dst_type)), dst_type.scalar)

    def fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        toward_zero = rounding == ir.ROUNDING_MODE.RTZ
        return handle(convert(src.data, numpy_dtype(dst_type), toward_zero=toward_zero), dst_type.scalar)

    def bitcast(self: Any, src: Any, dst_type: Any) -> Any:
        data = np.ascontiguousarray(src.data).view(numpy_dtype(dst_type))
        if dst_type.scalar.is_ptr() or src.dtype.scalar.is_ptr():
            tape.spoil()
        if dst_type.scalar.is_ptr():
            for view in src.attr.get("origin", ()):
                view.region.counted_in(numpy_dtype(dst_type.scalar.element_ty).itemsize)
        # A pointer keeps its origin as long as it stays a pointer.
        return handle(data, dst_type.scalar, src.attr if dst_type.scalar.is_ptr() and src.dtype.is_ptr() else {})

    def int_cast(self: Any, src: Any, dst_type: Any, *_: Any) -> Any:
        wrapped = {WRAPPED: src.attr[WRAPPED]} if WRAPPED in src.attr else {}
        return handle(convert(src.data, numpy_dtype(dst_type)), dst_type.scalar, wrapped)

    builder.cast_impl = cast
    builder.create_int_cast = int_cast
    for name in "si_to_fp ui_to_fp fp_to_si fp_to_ui fp_ext fp_trunc".split():
        setattr(builder, f"create_{name}", cast)
    builder.create_fp_to_fp = fp_to_fp
    for name in "bitcast int_to_ptr ptr_to_int".split():
        setattr(builder, f"create_{name}", bitcast)
    # 3.6 and 3.7 lack the constant that tl.full(..., tl.bfloat16) needs.
    builder.get_bf16 = lambda self, value: cast(self, self.get_fp32(value), self.get_bf16_ty())


def _patch_compound(builder: Any, handle: Any, ir: Any) -> None:
    def clampf(self: Any, arg: Any, lo: Any, hi: Any, propagate: Any) -> Any:
        propagate_nan = propagate != ir.PROPAGATE_NAN.NONE
        value, low, high = aligned(arg.data, lo.data, hi.data)
        return handle(arith.clamp(value, low, high, propagate_nan=propagate_nan), arg.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return handle(arith.fused_multiply_add(*aligned(x.data, y.data, z.data)), z.dtype.scalar)

    def select(self: Any, condition: Any, lhs: Any, rhs: Any) -> Any:
        dtype = numpy_dtype(rhs.dtype)
        which, left, right = aligned(condition.data, lhs.data, rhs.data)
        chosen = np.where(which, left.astype(dtype, copy=False), right.astype(dtype, copy=False))
        attributes: dict[str, Any] = {WRAPPED: Unwrapped((left, right))} if dtype.kind in "iu" else {}
        if rhs.dtype.scalar.is_ptr():
            attributes = joined(lhs.attr, rhs.attr) or attributes
        return handle(chosen, rhs.dtype.scalar, attributes)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, max_imprecise: Any) -> Any:
        bits = _MANTISSA_BITS.get(precision.name)
        if a.data.dtype == np.float32 and bits is not None:
            how = f"tl.dot of float32 with {precision.name.lower()} inputs was computed in full float32"
            note(f"{how}: the GPU keeps {bits} mantissa bits")
            if precision.name == "TF32":
                product_rounded(memory_findings.site(), loses=lambda: _beyond_tf32(a.data) or _beyond_tf32(b.data))
        return handle(arith.dot(a.data, b.data, d.data), d.dtype.scalar)

    def histogram(self: Any, data: Any, bins: int, mask: Any) -> Any:
        count = data.data.shape[0] if mask is None else max(data.data.shape[0], mask.data.shape[0])
        values = lanes(data.data, count)
        counted = arith.histogram(values, None if mask is None else lanes(mask.data, count), bins)
        return handle(counted, self.get_int32_ty())

    def all_ones(self: Any, type: Any) -> Any:
        return handle(arith.all_ones(numpy_dtype(type)), type.scalar)

    def extern_elementwise(
        self: Any, library: str, path: str, symbol: str, arguments: Any, returns: Any, pure: bool
    ) -> Any:
        return handle(libdevice.call(symbol, [a.data for a in arguments], numpy_dtype(returns)), returns.scalar)

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

    create(builder, clampf, fma, select, dot, dot_scaled, histogram, extern_elementwise)
    builder.get_all_ones_value = all_ones


def _beyond_tf32(factor: Array) -> bool:
    """Whether a float32 has digits that TF32 does not hold."""
    return bool((factor.view(np.int32) & ((1 << 13) - 1)).any())


class _Format(str):
    """A format name of ``tl.dot_scaled`` that is its own ``.value``."""

    __slots__ = ()

    @property
    def value(self) -> str:
        return str(self)


def _accept_plain_formats(semantic: Any) -> None:
    """Let ``dot_scaled`` take plain strings: 3.6 and 3.7 read ``.value``, which only the compiler's constants have."""
    upstream = semantic.dot_scaled

    def dot_scaled(self: Any, *args: Any, **named: Any) -> Any:
        return upstream(self, *(_Format(a) if isinstance(a, str) else a for a in args), **named)

    semantic.dot_scaled = dot_scaled


def _refuse(builder: Any, handle: Any) -> None:
    def inline_asm(self: Any, assembly: str, _: str, values: Any, kinds: Any, *rest: Any) -> Any:
        instruction = assembly.partition("//")[0].strip().removesuffix(";").rstrip()
        if instruction in _ORDER_OF_GRIDS and not values:
            return _Results([handle(np.zeros(1, numpy_dtype(kind)), kind.scalar) for kind in kinds])
        at = memory_findings.site()
        raise NotModelledError(
            f"inline assembly ({assembly.strip().splitlines()[0][:60]!r}) at {PurePath(at.file).name}:{at.line} cannot "
            "run on the CPU lane, which has no model of PTX. Test this kernel on a GPU (--fusion-device cuda)"
        )

    def missing(self: Any, name: str) -> Any:
        if not name.startswith("create_"):
            raise AttributeError(name)
        at = memory_findings.site()
        raise _NoOperationError(
            f"the operation {name.removeprefix('create_')!r} at {PurePath(at.file).name}:{at.line} has no model on the "
            "CPU lane. Test this kernel on a GPU (--fusion-device cuda)"
        )

    builder.create_inline_asm = inline_asm
    builder.__getattr__ = missing


class _Results(list[Any]):
    """The results of an operation that has several."""

    __slots__ = ()

    def get_result(self, index: int) -> Any:
        return self[index]


class _NoOperationError(NotModelledError, AttributeError):
    """An operation that the interpreter lacks; ``hasattr`` is false for it."""
