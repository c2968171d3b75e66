"""Restores functions and settings that judging uses to their state at import, and reports their replacements.

A kernel shares its process with the judge: it can replace ``torch.equal``, a timer, ``synchronize`` or functions of
this package, or change the default dtype. Any replacement is undone right after the call and is a finding. Patches from
before the call (a frozen clock, a fixture, a library's import) are not. A program can still evade this by writing to
memory below Python or to this module's own lists.
"""

from __future__ import annotations

import array
import builtins
import ctypes
import itertools
import math
import operator
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

perf_counter = time.perf_counter
process_time = time.process_time
equal = torch.equal
_synchronize = torch.cuda.synchronize
_cuda_runs: Callable[[], bool] = torch.cuda.is_initialized

# Functions for comparisons, waiting and timing. torch.manual_seed is missing on purpose: the first torch.compile of a
# process replaces it (torch/_dynamo/__init__.py).
_BUILTINS = "abs all any bool float getattr id int isinstance len map max min sorted sum tuple type zip"
_TIME = "monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns sleep time time_ns"
_STATISTICS = "fmean geometric_mean mean median quantiles stdev variance"
_MATH = "frexp isclose isfinite isinf isnan ldexp log2 sqrt"
_TORCH = (
    "Tensor abs all allclose amax amin any arange as_strided cat clone empty empty_like empty_permuted empty_strided "
    "eq equal frexp from_dlpack full full_like ge gt isclose isfinite isin isinf isnan ldexp le logical_and logical_or "
    "lt max maximum mean min minimum ne nonzero ones ones_like rand randn round searchsorted stack sub sum tensor "
    "where zeros zeros_like no_grad get_rng_state"
)
_TENSOR = (
    "__add__ __and__ __array__ __bool__ __eq__ __float__ __ge__ __getitem__ __gt__ __int__ __invert__ __le__ __lt__ "
    "__mul__ __ne__ __or__ __setitem__ __sub__ __torch_function__ abs all allclose amax any as_strided bool clone "
    "contiguous copy_ count_nonzero cpu data data_ptr detach double dtype element_size eq equal fill_ flatten float "
    "isclose isfinite isinf isnan item layout logical_and max mean min nan_to_num narrow ne new_empty nonzero numel "
    "numpy reshape resolve_conj resolve_neg shape storage_offset stride sub sum to tolist type untyped_storage view "
    "view_as_real zero_"
)
_CUDA = "Event Stream current_stream default_stream is_available max_memory_allocated memory_allocated synchronize"
_EVENT = "elapsed_time query record synchronize wait"
_OPTIONAL = {
    "torch.testing": "assert_allclose assert_close",
    "numpy": "all allclose any array_equal frombuffer isclose isfinite isnan",
    "numpy.testing": "assert_allclose assert_array_equal",
    "triton.testing": "assert_close do_bench do_bench_cudagraph",
    "timeit": "default_timer",
}
_MATMUL = "allow_bf16_reduced_precision_reduction allow_fp16_reduced_precision_reduction allow_fp16_accumulation"


def _where_cuda_runs(read: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: read() if _cuda_runs() else None


def _flag(owner: Any, where: str, name: str) -> tuple[str, Callable[[], Any], Callable[[Any], Any]]:
    return f"{where}.{name}", lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# Settings that a launcher changes and leaves: another dtype, no graph, TF32, or a stream that does not wait.
_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("torch's grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    ("torch's float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("torch's deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(_flag(torch.backends.cuda.matmul, "torch.backends.cuda.matmul", name) for name in _MATMUL.split()),
    _flag(torch.backends.cudnn, "torch.backends.cudnn", "allow_tf32"),
    ("the current CUDA device", _where_cuda_runs(torch.cuda.current_device), torch.cuda.set_device),
    ("the current CUDA stream", _where_cuda_runs(torch.cuda.current_stream), torch.cuda.set_stream),
)
# The parts of this package that call and decide.
_OWN = tuple(
    f"pytest_fusion.{name}" for name in "checks. oracle. run.bits run.fused run.memory run.placing run.pristine".split()
)
# The origins of functions that this package imports by name; others are patches.
_FAMILIAR = frozenset({"pytest_fusion", "torch", "numpy", "triton", "hypothesis", *sys.stdlib_module_names})
_ABSENT = object()

_found: dict[str, None] = {}


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on a CUDA device, on every stream."""
    _synchronize(device)


@contextmanager
def watched() -> Iterator[None]:
    """Undo what the body leaves replaced and store its names for ``take``."""
    watch = _watch()
    watch.renew()
    try:
        yield
    finally:
        for name in watch.undo():
            _found[name] = None


def take() -> list[str]:
    """The dotted names that watched code replaced since the last call."""
    for watch in _current:
        watch.keep_codes()
    names = list(_found)
    _found.clear()
    return names


def found() -> bool:
    """Whether ``take`` has anything to report."""
    return bool(_found)


def foreign() -> list[str]:
    """Functions in this package's modules that come from elsewhere."""
    return sorted(
        f"{module}.{name}"
        for module, facts in _own_modules()
        for name, value in vars(facts).items()
        if isinstance(value, types.FunctionType) and str(value.__module__).partition(".")[0] not in _FAMILIAR
    )


class _Chosen:
    """Some names of a module or a class; ``_ABSENT`` stands for a base class's value that a patch would hide."""

    __slots__ = ("held", "names", "owner", "where")

    def __init__(self, where: str, owner: Any, names: list[str]) -> None:
        self.where, self.owner, self.names = where, owner, names
        self.renew()

    def _now(self) -> Iterator[Any]:
        return map(vars(self.owner).get, self.names, itertools.repeat(_ABSENT))

    def renew(self) -> None:
        self.held = list(self._now())

    def intact(self) -> bool:
        """Whether nothing was replaced, by identity: a replacement may claim to be equal."""
        return all(map(operator.is_, self._now(), self.held))

    def undo(self) -> list[str]:
        replaced = [(name, v) for name, v, now in zip(self.names, self.held, self._now(), strict=True) if now is not v]
        for name, value in replaced:
            if value is _ABSENT:
                delattr(self.owner, name)
            else:
                setattr(self.owner, name, value)
        return [f"{self.where}.{name}" for name, _ in replaced]


class _Space(_Chosen):
    """A module or a class, with all its values; names added later do not matter."""

    __slots__ = ()

    def __init__(self, where: str, owner: Any) -> None:
        super().__init__(where, owner, [])

    def renew(self) -> None:
        self.names, self.held = list(vars(self.owner)), list(vars(self.owner).values())


class _Setting:
    """One setting of torch that holds for the whole process or thread; ``None`` while it cannot be read."""

    __slots__ = ("held", "name", "read", "write")

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.name, self.read, self.write = name, read, write
        self.renew()

    def _now(self) -> Any:
        try:
            return self.read()
        except RuntimeError:  # torch cannot read a precision set by both its old and its new names
            return None

    def renew(self) -> None:
        self.held = self._now()

    def intact(self) -> bool:
        return self.held is None or bool(self._now() == self.held)

    def undo(self) -> list[str]:
        self.write(self.held)
        return [self.name]


class _Watch:
    """The places, their values, and the code objects of this package's functions.

    It runs before and after every call of a kernel, 500 times a test: one comparison of the addresses of all 4,000
    values (0.1 ms) shows that nothing changed.
    """

    def __init__(self) -> None:
        self._chosen: list[_Chosen | _Setting] = [*_chosen_places(), *(_Setting(*each) for each in _SETTINGS)]
        self._own = _own_spaces()
        functions = {
            f"{space.where}.{name}": function
            for space in self._own
            for name, value in vars(space.owner).items()
            if (function := _function_in(value)) is not None
            # What Dynamo adds to a class has no module.
            and (function.__module__ or "").startswith("pytest_fusion")
        }
        self._functions = list(functions.values())
        self._names = list(functions)
        # Views of the dicts show later additions too.
        self._views = [vars(space.owner).values() for space in self._own]
        self._keep()
        self.keep_codes()
        self.modules = len(sys.modules)

    def _keep(self) -> None:
        """Store all values of this package's modules and classes, in order."""
        self._held = tuple(value for space in self._own for value in space.held)
        self._where = addresses(self._held)

    def keep_codes(self) -> None:
        """Store code objects; once a test, since only watched code changes this package's functions in it."""
        self._codes = tuple(map(_CODE, self._functions))
        self._codes_where = addresses(self._codes)

    def _own_intact(self) -> bool:
        """Whether values and their order are unchanged; a name added since shifts them and needs a closer look."""
        return addresses(tuple(itertools.chain.from_iterable(self._views))) == self._where

    def renew(self) -> None:
        """Accept the current state as the one to restore."""
        for place in self._chosen:
            # A value unreadable before may be readable now: a stream, once CUDA runs.
            if place.held is None or not place.intact():
                place.renew()
        if not self._own_intact():
            for space in self._own:
                space.renew()
            self._keep()

    def undo(self) -> list[str]:
        """Restore what was replaced since ``renew``, and return its names."""
        changed: list[str] = []
        for place in self._chosen:
            if not place.intact():
                changed += place.undo()
        if not self._own_intact():
            changed += [name for space in self._own for name in space.undo()]
        if addresses(tuple(map(_CODE, self._functions))) != self._codes_where:
            for name, function, code in zip(self._names, self._functions, self._codes, strict=True):
                if function.__code__ is not code:
                    changed.append(name)
                    function.__code__ = code
        return changed


def addresses(values: tuple[object, ...]) -> bytes:
    """Identities of the objects: a replacement may claim to be equal."""
    if _IN_LINE:
        return _bytes_at(id(values) + tuple.__basicsize__, len(values) * _POINTER)
    return array.array("Q", map(id, values)).tobytes()


def _is_in_line() -> bool:
    """Whether a tuple is its head and the pointers to its items, as in CPython."""
    if sys.implementation.name != "cpython":
        return False
    probe = (object(), object(), object())
    return _bytes_at(id(probe) + tuple.__basicsize__, 3 * _POINTER) == b"".join(
        id(value).to_bytes(_POINTER, sys.byteorder) for value in probe
    )


_POINTER = ctypes.sizeof(ctypes.c_void_p)
_bytes_at = ctypes.string_at
_IN_LINE = _is_in_line()
_CODE = operator.attrgetter("__code__")
_current: list[_Watch] = []


def _watch() -> _Watch:
    """The watch over what is imported by now."""
    if not _current or _current[0].modules != len(sys.modules):
        _current[:] = [_Watch()]
    return _current[0]


def _chosen_places() -> list[_Chosen]:
    places: list[tuple[str, Any, str]] = [
        ("builtins", builtins, _BUILTINS),
        ("time", time, _TIME),
        ("statistics", statistics, _STATISTICS),
        ("math", math, _MATH),
        ("torch", torch, _TORCH),
        ("torch.Tensor", torch.Tensor, _TENSOR),
        ("torch.cuda", torch.cuda, _CUDA),
        ("torch.cuda.Event", torch.cuda.Event, _EVENT),
    ]
    places += [(name, sys.modules[name], listed) for name, listed in _OPTIONAL.items() if name in sys.modules]
    return [
        _Chosen(where, owner, [name for name in listed.split() if hasattr(owner, name)])
        for where, owner, listed in places
    ]


def _own_modules() -> list[tuple[str, types.ModuleType]]:
    return [
        (name, module)
        for name, module in list(sys.modules.items())
        if name.startswith(_OWN) and isinstance(module, types.ModuleType)
    ]


def _own_spaces() -> list[_Space]:
    """This package's modules and the classes that they define."""
    spaces: list[_Space] = []
    for name, module in _own_modules():
        spaces.append(_Space(name, module))
        for inner, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__ == name:
                spaces.append(_Space(f"{name}.{inner}", value))
    return spaces


def _function_in(value: Any) -> types.FunctionType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None
