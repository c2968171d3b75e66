"""Restores functions and settings that judging uses to their state at import, and reports their replacements.

A kernel shares its process with the judge: it can replace ``torch.equal``, a timer, ``synchronize`` or functions of
this package, or change the default dtype. Any replacement is undone right after the call and is a finding. Patches from
before the call (a frozen clock, a fixture, a library's import) are not. A program can still evade this by writing to
memory below Python or to this module's own lists.
"""

from __future__ import annotations

import itertools
import operator
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

perf_counter = time.perf_counter
process_time = time.process_time
equal = torch.equal
_synchronize = torch.cuda.synchronize
_cuda_runs: Callable[[], bool] = torch.cuda.is_initialized

# Functions for comparisons, waiting and timing. torch.manual_seed is missing on purpose: the first torch.compile of a
# process replaces it (torch/_dynamo/__init__.py).
_MODULES = {
    "builtins": "abs all any bool float getattr id int isinstance len map max min sorted sum tuple type zip",
    "time": "monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns sleep time time_ns",
    "statistics": "fmean geometric_mean mean median quantiles stdev variance",
    "math": "frexp isclose isfinite isinf isnan ldexp log2 sqrt",
    "timeit": "default_timer",
    "torch": (
        "Tensor abs all allclose amax amin any arange as_strided cat clone empty empty_like empty_permuted "
        "empty_strided eq equal frexp from_dlpack full full_like ge gt isclose isfinite isin isinf isnan ldexp le "
        "logical_and logical_or lt max maximum mean min minimum ne nonzero ones ones_like rand randn round "
        "searchsorted stack sub sum tensor where zeros zeros_like no_grad get_rng_state"
    ),
    "torch.cuda": (
        "Event Stream current_stream default_stream is_available max_memory_allocated memory_allocated synchronize"
    ),
    "torch.testing": "assert_allclose assert_close",
    "numpy": "all allclose any array_equal frombuffer isclose isfinite isnan",
    "numpy.testing": "assert_allclose assert_array_equal",
    "triton.testing": "assert_close do_bench do_bench_cudagraph",
}
_TENSOR = (
    "__add__ __and__ __array__ __bool__ __eq__ __float__ __ge__ __getitem__ __gt__ __int__ __invert__ __le__ __lt__ "
    "__mul__ __ne__ __or__ __setitem__ __sub__ __torch_function__ abs all allclose amax any as_strided bool clone "
    "contiguous copy_ count_nonzero cpu data data_ptr detach double dtype element_size eq equal fill_ flatten float "
    "isclose isfinite isinf isnan item layout logical_and max mean min nan_to_num narrow ne new_empty nonzero numel "
    "numpy reshape resolve_conj resolve_neg shape storage_offset stride sub sum to tolist type untyped_storage view "
    "view_as_real zero_"
)
_EVENT = "elapsed_time query record synchronize wait"
_MATMUL = "allow_bf16_reduced_precision_reduction allow_fp16_reduced_precision_reduction allow_fp16_accumulation"
_ABSENT = object()
_CODE = operator.attrgetter("__code__")


@dataclass(slots=True)
class _Slot:
    """A name of a module or a class, or a setting of torch: ``held`` is the value to restore."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    # By identity: a replacement may claim to be equal.
    same: Callable[[Any, Any], Any] = operator.is_
    held: Any = None

    def renew(self) -> None:
        self.held = self.read()

    def undo(self) -> bool:
        """Restore the value; whether it was another one."""
        if self.same(self.read(), self.held):
            return False
        self.write(self.held)
        return True


def _chosen(where: str, owner: Any, names: str) -> Iterator[_Slot]:
    """The names that ``owner`` or a base class of it has."""
    for name in (name for name in names.split() if hasattr(owner, name)):
        yield _Slot(f"{where}.{name}", partial(vars(owner).get, name, _ABSENT), partial(_put, owner, name))


def _put(owner: Any, name: str, value: Any) -> None:
    """Set the value; ``_ABSENT`` stands for that of a base class, which a patch hides."""
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _setting(name: str, read: Callable[[], Any], write: Callable[[Any], Any]) -> _Slot:
    """A setting that holds for the whole process or thread; ``None`` while it cannot be read, which is no change."""
    return _Slot(name, partial(_read, read), write, lambda now, held: held is None or bool(now == held))


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # torch cannot read a precision set by both its old and its new names
        return None


def _flag(owner: Any, where: str, name: str) -> tuple[str, Callable[[], Any], Callable[[Any], Any]]:
    return f"{where}.{name}", partial(getattr, owner, name), partial(setattr, owner, name)


# Settings that a launcher changes and leaves: another dtype, no graph, TF32, or a stream that does not wait.
_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any]], ...] = (
    ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("torch's grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    ("torch's float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("torch's deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(_flag(torch.backends.cuda.matmul, "torch.backends.cuda.matmul", name) for name in _MATMUL.split()),
    _flag(torch.backends.cudnn, "torch.backends.cudnn", "allow_tf32"),
    ("the current CUDA device", lambda: torch.cuda.current_device() if _cuda_runs() else None, torch.cuda.set_device),
    ("the current CUDA stream", lambda: torch.cuda.current_stream() if _cuda_runs() else None, torch.cuda.set_stream),
)
# The parts of this package that call and decide.
_OWN = tuple(
    f"pytest_fusion.{name}" for name in "checks. oracle. run.bits run.fused run.memory run.placing run.pristine".split()
)
# The origins of functions that this package imports by name; others are patches.
_FAMILIAR = frozenset({"pytest_fusion", "torch", "numpy", "triton", "hypothesis", *sys.stdlib_module_names})

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


class _Watch:
    """The places, their values, and the code objects of this package's functions, compared before and after every call
    of a kernel, 500 times a test: one walk over all 4,000 values (0.1 ms) shows that nothing changed."""

    def __init__(self) -> None:
        self._slots = [*_chosen_slots(), *(_setting(*each) for each in _SETTINGS)]
        self._places = _own_places()
        self._functions = {
            f"{where}.{name}": function
            for where, owner in self._places
            for name, value in vars(owner).items()
            if (function := _function_in(value)) is not None
            # What Dynamo adds to a class has no module.
            and (function.__module__ or "").startswith("pytest_fusion")
        }
        # Views of the dicts show later additions too.
        self._views = [vars(owner).values() for _, owner in self._places]
        self._accept()
        self.keep_codes()
        self.modules = len(sys.modules)

    def _accept(self) -> None:
        """Store all values of this package's modules and classes."""
        self._held = [dict(vars(owner)) for _, owner in self._places]
        self._values = list(itertools.chain.from_iterable(map(dict.values, self._held)))

    def keep_codes(self) -> None:
        """Store code objects; once a test, since only watched code changes this package's functions in it."""
        self._codes = list(map(_CODE, self._functions.values()))

    def _intact(self) -> bool:
        """Whether values and their order are unchanged; a name added since shifts them and needs a closer look."""
        if list(map(len, self._views)) != list(map(len, self._held)):
            return False
        return all(map(operator.is_, itertools.chain.from_iterable(self._views), self._values))

    def renew(self) -> None:
        """Accept the current state as the one to restore."""
        for slot in self._slots:
            slot.renew()
        if not self._intact():
            self._accept()

    def undo(self) -> list[str]:
        """Restore what was replaced since ``renew``, and return its names."""
        changed = [slot.name for slot in self._slots if slot.undo()]
        if not self._intact():
            for (where, owner), values in zip(self._places, self._held, strict=True):
                for name in [name for name, value in values.items() if vars(owner).get(name, _ABSENT) is not value]:
                    setattr(owner, name, values[name])
                    changed.append(f"{where}.{name}")
        if not all(map(operator.is_, map(_CODE, self._functions.values()), self._codes)):
            for (name, function), code in zip(self._functions.items(), self._codes, strict=True):
                if function.__code__ is not code:
                    function.__code__ = code
                    changed.append(name)
        return changed


_current: list[_Watch] = []


def _watch() -> _Watch:
    """The watch over what is imported by now."""
    if not _current or _current[0].modules != len(sys.modules):
        _current[:] = [_Watch()]
    return _current[0]


def _chosen_slots() -> Iterator[_Slot]:
    yield from _chosen("torch.Tensor", torch.Tensor, _TENSOR)
    yield from _chosen("torch.cuda.Event", torch.cuda.Event, _EVENT)
    for where, names in _MODULES.items():
        if where in sys.modules:
            yield from _chosen(where, sys.modules[where], names)


def _own_modules() -> list[tuple[str, types.ModuleType]]:
    return [
        (name, module)
        for name, module in list(sys.modules.items())
        if name.startswith(_OWN) and isinstance(module, types.ModuleType)
    ]


def _own_places() -> list[tuple[str, Any]]:
    """This package's modules and the classes that they define, by name."""
    places: list[tuple[str, Any]] = []
    for name, module in _own_modules():
        classes = [one for one in vars(module).items() if isinstance(one[1], type) and one[1].__module__ == name]
        places += [(name, module), *((f"{name}.{inner}", value) for inner, value in classes)]
    return places


def _function_in(value: Any) -> types.FunctionType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else None
