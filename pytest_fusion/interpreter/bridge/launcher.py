"""One launch: binds its arguments, calls the observers, passes it to the executor.

Arguments become the tensors that a GPU kernel receives: a Python float is float32, an integer the narrowest of i32,
i64, u64 that holds it, a bool i1; an annotation such as ``tl.float64`` or ``"i64"`` overrides this. Upstream leaves
floats as Python numbers, so ``eps.to(tl.float32)`` fails, and wraps integers from 2**31 on as uint32. A device
specialises an integer 1 to a constant; as a tensor without ``.to`` it computes the same values.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from pytest_fusion.errors import GridTooLargeError, NotModelledError
from pytest_fusion.interpreter.bridge.numpy_dtypes import Array, numpy_dtype
from pytest_fusion.interpreter.control import batch, executor
from pytest_fusion.interpreter.control.batch import NotBatchedError
from pytest_fusion.interpreter.control.executor import Program, ProgramError
from pytest_fusion.interpreter.control.rewrite import rewritten
from pytest_fusion.interpreter.control.runtime import KernelRuntime
from pytest_fusion.interpreter.launch import Constexpr, Launch, announce, goes_far, observed
from pytest_fusion.interpreter.memory.regions import Regions

_MOST_CACHED = 4096
_INTEGER_WIDTH = re.compile(r"([iu])(\d+)")


class Arguments:
    """Converts launch arguments; built once per process."""

    def __init__(self, tl: Any, handle: Any, upstream: Any) -> None:
        self._tl = tl
        self._handle = handle
        self._upstream = upstream
        self._types: dict[str, tuple[Any, np.dtype[Any]]] = {}
        # A launch has two dozen scalars, most of them recurring strides, sizes and widths.
        self._recurring = lru_cache(maxsize=_MOST_CACHED)(self._number)
        self._pointers: dict[Any, Any] = {}

    def convert(self, value: Any, annotation: str = "") -> Any:
        """``value`` as a kernel sees it; ``annotation`` is the canonical type name (``"fp32"``) or empty."""
        if isinstance(value, bool | np.bool_):
            return self._scalar(bool(value), annotation or "u1")
        if isinstance(value, int | np.integer):
            return self._scalar(int(value), annotation or _narrowest(int(value)))
        if isinstance(value, float | np.floating):
            return self._scalar(float(value), annotation or "fp32")
        if isinstance(value, tuple):
            converted = [self.convert(v) for v in value]
            return type(value)(*converted) if hasattr(value, "_fields") else type(value)(converted)
        if not hasattr(value, "data_ptr"):
            return self._upstream(value)
        dtype = value.dtype
        pointer = self._pointers.get(dtype)
        if pointer is None:
            made = self._upstream(value)
            self._pointers[dtype] = made.type
            return made
        return self._tl.tensor(self._handle(np.array([value.data_ptr()], np.uint64), pointer), pointer)

    def launched(self, name: str, value: Any, annotation: str, regions: Regions) -> Any:
        """``convert(value)``, with its memory registered in ``regions`` and as the origin of the pointer."""
        if isinstance(value, tuple):
            parts = [self.launched(f"{name}[{i}]", v, "", regions) for i, v in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        converted = self.convert(value, annotation)
        descriptor = hasattr(value, "block_shape")
        tensor = value.base if descriptor else value
        if not hasattr(tensor, "data_ptr"):
            return converted
        view = regions.add(name, tensor)
        if view is not None:
            handle = converted.handle.base if descriptor else converted.handle
            handle.attr["origin"] = frozenset({view})
            # torch reports the address of an empty tensor as 0; a finding needs its place in the storage.
            handle.data = np.array([view.region.address + view.start], np.uint64)
        return converted

    def _scalar(self, value: bool | float, name: str) -> Any:
        # Of floats 0.0 and -0.0 are equal keys.
        type_, data = (self._recurring if type(value) is int else self._number)(value, name)
        return self._tl.tensor(self._handle(data, type_), type_)

    def _number(self, value: bool | float, name: str) -> tuple[Any, Array]:
        known = self._types.get(name)
        if known is None:
            type_ = self._tl.str_to_ty(name, None)
            known = self._types[name] = (type_, numpy_dtype(type_))
        type_, dtype = known
        if dtype.kind in "iu":
            value = int(value) & ((1 << (8 * dtype.itemsize)) - 1)
            data = np.array([value], np.dtype(f"u{dtype.itemsize}")).view(dtype)
        else:
            # A float beyond float32 becomes infinity without a warning, as in the launcher's C.
            with np.errstate(all="ignore"):
                data = np.array([value], np.float64).astype(dtype)
        return type_, data


def _narrowest(value: int) -> str:
    if -(2**31) <= value < 2**31:
        return "i32"
    if -(2**63) <= value < 2**63:
        return "i64"
    if value < 2**64:
        return "u64"
    raise OverflowError(f"the launch argument {value} does not fit in a 64-bit integer")


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_MOST_IN_Y_AND_Z = 65535
# Warps of a launch that does not set them.
_WARPS = 4
# The most registers of a thread (CUDA C++ Programming Guide, "Technical Specifications"): then the fewest programs fit,
# and a kernel that launches as many as fit loops over further rows.
_REGISTERS = 255
_SHARED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Signature:
    """A kernel's facts for all launches.

    ``types``: annotated scalar types by name. For ``plain`` names (not constexpr, no type) an integer 1 is a constant.
    """

    signature: inspect.Signature
    names: frozenset[str]
    constexprs: frozenset[str]
    types: dict[str, str]
    plain: frozenset[str]
    source: str


@cache
def _signature(function: Any) -> Signature:
    from triton.runtime.jit import _normalize_ty

    constexprs, types = set(), {}
    for name, annotation in function.__annotations__.items():
        text = _normalize_ty(annotation) if annotation is not None else ""
        text = text if isinstance(text, str) else ""
        if "constexpr" in text:
            constexprs.add(name)
        elif text in {"fp16", "bf16", "fp32", "fp64"} or (_INTEGER_WIDTH.fullmatch(text) and text != "i1"):
            types[name] = text
        elif text in {"i1", "u1"}:
            types[name] = "u1"
    signature, code = inspect.signature(function), function.__code__
    names = frozenset(signature.parameters)
    source = f"{code.co_filename}:{code.co_firstlineno}"
    return Signature(signature, names, frozenset(constexprs), types, names - constexprs - types.keys(), source)


def refuse_gluon(compiled: Any) -> None:
    """Make launches of Gluon kernels raise ``NotModelledError``: ``gluon.jit`` ignores ``TRITON_INTERPRET``."""
    run_compiled = compiled.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_gluon():
            raise NotModelledError(
                f"{self.fn.__name__} is written in Gluon, which the CPU lane does not interpret. Test this kernel on a "
                "GPU (--fusion-device cuda)"
            )
        return run_compiled(self, *args, **kwargs)

    compiled.run = run


class _NotKnownError(NotModelledError, AttributeError):
    """An attribute that only a compiled kernel has; ``hasattr`` is false for it."""


class Warmed:
    """The result of ``kernel.warmup(...)``: enough to size a grid and to launch; nothing is compiled.

    Tutorial 02 (fused softmax) and kernels made after it launch as many programs as registers and shared memory allow.
    ``launch`` gets a grid and positional arguments.
    """

    def __init__(self, name: str, warps: int, launch: Callable[[Any, tuple[Any, ...]], None]) -> None:
        # It imports torch, which Triton's import must not.
        from pytest_fusion.interpreter.bridge.modelled_device import PROPERTIES

        self.name = name
        self.n_regs = min(_REGISTERS, int(PROPERTIES["regs_per_multiprocessor"]) // (32 * warps))
        self.n_spills = 0
        self.n_max_threads = 1024
        self.metadata = SimpleNamespace(name=name, shared=_SHARED_BYTES, num_warps=warps, num_ctas=1)
        self._launch = launch

    def _init_handles(self) -> None:
        """There is no module to load."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, stream=None: self._launch(grid, args)

    def __getattr__(self, name: str) -> Any:
        raise _NotKnownError(
            f"{name!r} of the compiled kernel {self.__dict__.get('name', '')} does not exist: the CPU lane compiles "
            "nothing. Test this kernel on a GPU (--fusion-device cuda)"
        )


class Launcher:
    """Launches interpreted kernels; built once per process from ``triton.runtime.interpreter``."""

    def __init__(self, interpreter: Any, runtime: KernelRuntime) -> None:
        from triton import knobs

        self._interpreter = interpreter
        self._knobs = knobs
        self._arguments = Arguments(interpreter.tl, interpreter.TensorHandle, interpreter._implicit_cvt)
        # The rewritten form of a function, made once.
        self.rewrite = cache(partial(rewritten, runtime=runtime))
        self._plain = interpreter.interpreter_builder.options
        self._debugging = interpreter.InterpreterOptions(debug=True)
        self._precisions = tuple(name.lower() for name in interpreter._ir.INPUT_PRECISION.__members__)
        self._options_of = cache(self._options)
        interpreter._implicit_cvt = self._arguments.convert

    def patch(self) -> None:
        """Redirect Triton's own entry points to this launcher."""
        function_class = self._interpreter.InterpretedFunction
        launcher = self

        def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
            if warmup:
                return launcher.warmed(self, args, kwargs)
            launcher.launch(self, args, grid, kwargs)
            return None

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            function = launcher.rewrite(self.fn)
            if function is self.fn and batch.current.count > 1:
                raise NotBatchedError(_sourceless(self.fn))
            return function(*args, **kwargs)

        function_class.run = run
        function_class.__call__ = call
        function_class.rewrite = lambda self: launcher.rewrite(self.fn)

    def launch(self, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
        """Launch ``kernel`` (an ``InterpretedFunction``); its error is raised as ``InterpreterError``."""
        known = _signature(kernel.fn)
        named = {k: v for k, v in kwargs.items() if k in known.names}
        host_args, host_named, on_device = self._on_host(kernel, args, named)
        bound_args = known.signature.bind(*host_args, **host_named)
        bound_args.apply_defaults()
        for hook in kernel.pre_run_hooks:
            hook(*host_args, **host_named)
        program = self.bind(kernel, known, bound_args.arguments, grid)
        if observed():
            announce(self._described(kernel, known, bound_args.arguments, program))
        debug = bool(kernel.kwargs.get("debug") or self._knobs.runtime.debug)
        self.run(program, debug=debug, warps=_warps(kwargs))
        if on_device is not None:
            on_device()

    def warmed(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Warmed:
        """The result of ``kernel.warmup``: its launches use the constants that were compiled in."""
        known = _signature(kernel.fn)
        bound = known.signature.bind_partial(*args, **{k: v for k, v in kwargs.items() if k in known.names})
        bound.apply_defaults()
        constants = {name: value for name, value in bound.arguments.items() if name in known.constexprs}

        def launch(grid: Any, given: tuple[Any, ...]) -> None:
            named = dict(zip(known.signature.parameters, given, strict=False))
            self.launch(kernel, (), grid, {**named, **constants, "num_warps": warps})

        warps = _warps(kwargs)
        return Warmed(kernel.fn.__name__, warps, launch)

    def bind(self, kernel: Any, known: Signature, values: dict[str, Any], grid: Any) -> Program:
        """The program of a launch: arguments as tensors, and the grid evaluated on the raw values, as on a GPU."""
        constexpr = self._interpreter.tl.constexpr
        meta = {n: v.value if isinstance(v, constexpr) else v for n, v in values.items()}
        sizes = grid(meta) if callable(grid) else grid
        sizes = sizes if isinstance(sizes, tuple | list) else (sizes,)
        if not 1 <= len(sizes) <= 3:
            raise ValueError(f"a launch grid has one to three dimensions, {kernel.fn.__name__} was given {sizes!r}")
        x, y, z = (*(operator.index(s) for s in sizes), 1, 1)[:3]
        # Triton's launcher skips a grid without programs, so CUDA never sees it.
        if max(y, z) > _MOST_IN_Y_AND_Z and x * y * z:
            raise GridTooLargeError(
                f"{kernel.fn.__name__} was launched on a grid of {(x, y, z)}; CUDA refuses more than "
                f"{_MOST_IN_Y_AND_Z} in the second and third dimension: put the largest one first"
            )
        regions = Regions()
        arguments = {
            n: v if n in known.constexprs else self._arguments.launched(n, v, known.types.get(n, ""), regions)
            for n, v in meta.items()
        }
        ones = {name for name in known.plain if type(meta[name]) is int and meta[name] == 1}
        if ones:
            names = list(known.signature.parameters)
            listed = kernel.kwargs.get("do_not_specialize") or ()
            for name in ones - {names[one] if isinstance(one, int) else one for one in listed}:
                arguments[name].to = _constant(name)
        function = self.rewrite(kernel.fn)
        reason = _sourceless(kernel.fn) if function is kernel.fn else ""
        return Program(kernel.fn.__name__, function, arguments, (x, y, z), regions, reason)

    def run(self, program: Program, *, debug: bool = False, warps: int = _WARPS) -> None:
        """Run every program of the grid; an error of one is raised as ``InterpreterError``."""
        builder = self._interpreter.interpreter_builder
        before = builder.options
        builder.options = self._options_of(warps, debug)
        builder.set_grid_dim(*program.grid)
        try:
            executor.run(replace(program, options=(debug, warps)))
        except ProgramError as wrapped:
            error = wrapped.__cause__
            if self._knobs.compilation.front_end_debugging:
                raise error from None  # type: ignore[misc]
            where = f"kernel {program.kernel}, program {wrapped.program} of {program.grid}"
            text = f"{type(error).__name__}: {error} ({where})"
            raise self._interpreter.InterpreterError(text) from error
        finally:
            builder.options = before

    def _options(self, warps: int, debug: bool) -> Any:
        """The builder's options for a launch; upstream's lack warps and the precisions of compilers since bf16x3."""
        base = self._debugging if debug else self._plain
        found = replace(base, allowed_dot_input_precisions=self._precisions)
        object.__setattr__(found, "num_warps", warps)
        return found

    def _on_host(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Arguments in host memory; tensors already there are used in place."""
        if all(_in_host_memory(v) for v in (*args, *named.values())):
            return args, named, None
        executor = self._interpreter.GridExecutor(kernel.fn, kernel.arg_names, (1,), [])
        host_args, host_named = executor._init_args_hst(args, named)
        return host_args, host_named, lambda: executor._restore_args_dev(args, host_args, named, host_named)

    def _described(self, kernel: Any, known: Signature, values: dict[str, Any], program: Program) -> Launch:
        constexprs = {n: _plain_constexpr(values[n]) for n in values if n in known.constexprs}
        return Launch(kernel.fn.__name__, program.grid, constexprs, known.source, goes_far(values.values()))


def _warps(options: dict[str, Any]) -> int:
    return int(getattr(given := options.get("num_warps", _WARPS), "value", given))


def _constant(name: str) -> Callable[..., Any]:
    """The ``.to`` of an integer argument that is 1: it raises, since Triton compiles 1 as a Python ``int``."""

    def to(*_: Any, **__: Any) -> Any:
        raise AttributeError(
            f"'int' object has no attribute 'to': {name} is 1, which Triton compiles as a constant on a GPU; write "
            f"tl.cast({name}, ...), or list it in do_not_specialize="
        )

    return to


def _sourceless(function: Any) -> str:
    return f"the source of {function.__name__} cannot be found, so its branches cannot be followed program by program"


def _in_host_memory(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_in_host_memory(v) for v in value)
    # A tensor descriptor holds its tensor in `base`.
    device = getattr(value.base if hasattr(value, "block_shape") else value, "device", None)
    return device is None or getattr(device, "type", str(device)) == "cpu"


def _plain_constexpr(value: Any) -> Constexpr:
    value = getattr(value, "value", value)
    if isinstance(value, bool | int | float | str):
        return value
    return str(getattr(value, "__name__", value))
