"""Memory operations of the interpreter's builder: pointers, loads, stores, atomics, descriptors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.builder_shapes import create
from pytest_fusion.interpreter.bridge.descriptors import BlockPointer, Descriptor
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, is_float, numpy_dtype, poison
from pytest_fusion.interpreter.compute import atomics
from pytest_fusion.interpreter.control import batch
from pytest_fusion.interpreter.control.batch import EndlessLoopError, NotBatchedError, WaitsForAnotherError, aligned
from pytest_fusion.interpreter.control.rewrite import AHEAD
from pytest_fusion.interpreter.memory import access, memory_findings, transfers
from pytest_fusion.interpreter.memory.regions import Origin

# The operations that atomics and reductions through descriptors share, by Triton's names.
_FOLDS: dict[str, np.ufunc] = {
    "ADD": np.add,
    "MAX": np.fmax,
    "MIN": np.fmin,
    "AND": np.bitwise_and,
    "OR": np.bitwise_or,
    "XOR": np.bitwise_xor,
}


def _origin(handle: Any) -> Origin | None:
    found: Origin | None = handle.attr.get("origin")
    return found


def _array(mask: Any) -> Array | None:
    return None if mask is None else np.asarray(mask.data)


def loader(handle: Any) -> Callable[..., Any]:
    """A function that loads (``transfers.load``) and returns a handle of the given type.

    Findings wait for a use of the value, as compilers drop unused loads, but not those for a loop's next iteration.
    """

    class Suspect(handle):  # type: ignore[misc]
        """A loaded value with findings that its first use reports; ``predication`` merges it without a use."""

        def __init__(self, values: Array, dtype: Any, held: list[memory_findings.Finding]) -> None:
            self.values, self.held = values, held
            self.dtype = dtype
            self.attr: dict[str, Any] = {}

        @property
        def data(self) -> Array:
            held, self.held = self.held, []
            for finding in held:
                memory_findings.report(finding)
            return self.values

    def load(pointee: Any, *args: Any) -> Any:
        with memory_findings.deferring() as held:
            values = transfers.load(*args)
        if not held:
            return handle(values, pointee)
        suspect = Suspect(values, pointee, held)
        if any(finding.line in AHEAD.get(finding.file, ()) for finding in held):
            return handle(suspect.data, pointee)
        return suspect

    return load


def patch_memory(interpreter: Any) -> None:
    """Replace the operations on memory, for the whole process."""
    _patch_pointers(interpreter)
    _patch_blocks(interpreter)
    _patch_atomics(interpreter)


def _patch_pointers(interpreter: Any) -> None:
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    semantic = interpreter.TritonSemantic
    upstream_load = semantic.load
    loaded = loader(handle)
    other_given = [False]

    def semantic_load(self: Any, ptr: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        # Upstream passes `other.handle if other else None`, which drops a scalar `other` of zero.
        other_given[0] = other is not None
        try:
            return upstream_load(self, ptr, mask, other, *rest, **named)
        finally:
            other_given[0] = False

    def add_pointer(self: Any, ptr: Any, offset: Any) -> Any:
        # One byte holds an int1, whose width is one bit.
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        pointers, offsets = aligned(ptr.data, offset.data)
        # A view where possible: 64-bit offsets only change their signedness.
        steps = offsets.view(np.uint64) if offsets.dtype == np.int64 else offsets.astype(np.uint64)
        return handle(pointers + (steps if size == 1 else steps * np.uint64(size)), ptr.dtype, ptr.attr)

    def load(self: Any, ptr: Any, *_: Any) -> Any:
        pointee = ptr.get_element_ty()
        return loaded(pointee, ptr.data, _origin(ptr), numpy_dtype(pointee))

    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any) -> Any:
        pointee = ptrs.get_element_ty()
        dtype = numpy_dtype(pointee)
        if other is not None:
            rest = other.data
        else:
            rest = np.zeros(1, dtype) if other_given[0] else None
        return loaded(pointee, ptrs.data, _origin(ptrs), dtype, _array(mask), rest)

    def store(self: Any, ptr: Any, value: Any, *_: Any) -> None:
        transfers.store(ptr.data, _origin(ptr), value.data)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        transfers.store(ptrs.data, _origin(ptrs), value.data, _array(mask))

    semantic.load = semantic_load
    builder.create_addptr = add_pointer
    create(builder, load, masked_load, store, masked_store)


def _patch_blocks(interpreter: Any) -> None:
    builder, handle, ir = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter._ir

    def padded(dtype: np.dtype[Any], nan: Array) -> Array:
        """The value outside of a block's bounds: NaN in the programs where ``nan`` holds, else zero.

        Undefined without padding, but not poisoned: NVIDIA's code uses zero today, and flash-linear-attention relies on
        it.
        """
        zero = np.zeros(1, dtype)
        return np.where(nan, np.full(1, poison(dtype), dtype), zero) if is_float(dtype) and nan.any() else zero

    load = loader(handle)

    def block_load(self: Any, ptr: Any, boundary_check: Any, padding: Any, *_: Any) -> Any:
        pointers, mask = ptr.block(boundary_check)
        pointee = ptr.base.get_element_ty()
        outside = padded(ptr.dtype, np.array([padding == ir.PADDING_OPTION.PAD_NAN]))
        return load(pointee, pointers, _origin(ptr.base), ptr.dtype, mask, outside)

    def block_store(self: Any, ptr: Any, value: Any, boundary_check: Any, *_: Any) -> None:
        pointers, mask = ptr.block(boundary_check)
        transfers.store(pointers, _origin(ptr.base), value.data, mask)

    def make_tensor_descriptor(
        self: Any, base: Any, shape: Any, strides: Any, tensor_shape: Any, is_signed: Any, padding: Any = None, *_: Any
    ) -> Descriptor:
        return Descriptor.make(base, shape, strides, tensor_shape, nan=padding == ir.PADDING_OPTION.PAD_NAN)

    def loaded(desc: Descriptor, pointers: Array, mask: Array) -> Any:
        pointee = desc.base.get_element_ty()
        values = load(pointee, pointers, _origin(desc.base), desc.dtype, mask, padded(desc.dtype, desc.nan))
        if np.any(desc.round_f32_to_tf32) and desc.dtype == np.float32:
            which, whole = aligned(np.atleast_1d(desc.round_f32_to_tf32), values.data)
            return handle(np.where(which, interpreter._round_f32_to_tf32(whole), whole), pointee)
        return values

    def descriptor_load(self: Any, desc: Descriptor, indices: Any, *_: Any) -> Any:
        return loaded(desc, *desc.block(indices))

    def descriptor_store(self: Any, desc: Descriptor, value: Any, indices: Any) -> None:
        pointers, mask = desc.block(indices)
        transfers.store(pointers, _origin(desc.base), value.data, mask)

    def descriptor_gather(self: Any, desc: Descriptor, x_offsets: Any, y_offset: Any, type: Any) -> Any:
        return loaded(desc, *desc.rows(x_offsets, y_offset))

    def descriptor_scatter(self: Any, desc: Descriptor, value: Any, x_offsets: Any, y_offset: Any) -> None:
        pointers, mask = desc.rows(x_offsets, y_offset)
        transfers.store(pointers, _origin(desc.base), value.data, mask)

    functions = {getattr(ir.DESCRIPTOR_REDUCE_KIND, name): function for name, function in _FOLDS.items()}

    def descriptor_reduce(self: Any, kind: Any, desc: Descriptor, value: Any, indices: Any, *_: Any) -> None:
        pointers, mask = desc.block(indices)
        update = partial(atomics.fold, functions[kind])
        values = np.ascontiguousarray(value.data)
        transfers.atomic(pointers, _origin(desc.base), values, mask, update, acquire=False, release=False)

    create(builder, make_tensor_descriptor, descriptor_load, descriptor_store)
    create(builder, descriptor_gather, descriptor_scatter, descriptor_reduce)
    if hasattr(builder, "create_tensor_pointer_load"):
        builder.create_make_block_ptr = lambda self, base, shape, strides, offsets, block_shape, order: (
            BlockPointer.make(base, shape, strides, offsets, block_shape)
        )
        builder.create_advance = lambda self, ptr, offsets: ptr.advance(offsets)
        builder.create_tensor_pointer_load = block_load
        builder.create_tensor_pointer_store = block_store


def _patch_atomics(interpreter: Any) -> None:
    builder, handle, ir = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter._ir
    operation = ir.ATOMIC_OP
    functions = {getattr(operation, name): function for name, function in _FOLDS.items()}
    functions |= {operation.FADD: np.add, operation.UMAX: np.maximum, operation.UMIN: np.minimum}
    for_floats = (operation.FADD, operation.MAX, operation.MIN)
    unsigned = (operation.UMAX, operation.UMIN)
    acquiring = {ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE}
    releasing = {ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE}

    def run(ptr: Any, values: Array, mask: Any, sem: Any, update: Any, expected: Array | None = None) -> Array:
        order = {"acquire": sem in acquiring, "release": sem in releasing}
        return transfers.atomic(ptr.data, _origin(ptr), values, mask, update, expected=expected, **order)

    def atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        values = np.ascontiguousarray(val.data)
        if op == operation.XCHG:
            return handle(run(ptr, values, _array(mask), sem, atomics.exchange), val.dtype.scalar)
        if op not in functions or (is_float(values.dtype) and op not in for_floats):
            raise NotImplementedError(f"atomic {op} on {val.dtype}: GPUs do not have it either")
        if op in unsigned:
            values = values.view(f"u{values.dtype.itemsize}")
        elif values.dtype.kind == "u" and op in (operation.MAX, operation.MIN):
            values = values.view(f"i{values.dtype.itemsize}")
        found = run(ptr, values, _array(mask), sem, partial(atomics.fold, functions[op]))
        return handle(found.view(numpy_dtype(val.dtype)), val.dtype.scalar)

    def atomic_cas(self: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        found = run(ptr, np.ascontiguousarray(val.data), None, sem, atomics.compare_and_swap, expected=cmp.data)
        return handle(found, cmp.dtype.scalar)

    def atomic_load(self: Any, ptr: Any, mask: Any, sem: Any, scope: Any) -> Any:
        pointee = ptr.get_element_ty()
        nothing = np.zeros((1,) * ptr.data.ndim, numpy_dtype(pointee))
        return handle(run(ptr, nothing, _array(mask), sem, atomics.read), pointee)

    def atomic_store(self: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> None:
        run(ptr, np.ascontiguousarray(value.data), _array(mask), sem, atomics.exchange)

    def atomic_poll(self: Any, ptr: Any, expected: Any, timeout: Any, sem: Any, scope: Any) -> Any:
        a, b = aligned(atomic_load(self, ptr, None, sem, scope).data, expected.data)
        matched = np.asarray(a == b)
        if timeout is None and not bool(batch.current.of_active(matched).all()):
            if access.launch().grid == (1, 1, 1):
                raise EndlessLoopError(
                    "atomic_poll never ends: the launch has no other program to store what it expects"
                )
            what = "atomic_poll waits for what only another program of the launch can do"
            if batch.current.count > 1:
                raise NotBatchedError(what)
            raise WaitsForAnotherError(f"{what}, and every program before it has ended")
        return handle(matched, interpreter.tl.int1)

    create(builder, atomic_rmw, atomic_cas)
    create(builder, atomic_load, atomic_store, atomic_poll)  # Triton 3.9
