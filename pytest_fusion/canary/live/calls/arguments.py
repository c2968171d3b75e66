"""A call's arguments: their names and tensors, and counters of calls by class of shapes, without a lock."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.run.process.fork import cuda_is_poisoned

# More tensors of a call would make too many classes.
_MOST_TENSORS = 4
_MOST_SHAPES = 2 * _MOST_TENSORS
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype))

Names = Callable[[tuple[Any, ...], Mapping[str, Any]], Mapping[str, Any]]


def names_of(function: Callable[..., Any]) -> Names:
    """A function that maps a call's arguments to ``name -> value``; ``arg0``, ... where the signature is not known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None

    def named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        if signature is not None:
            try:
                return signature.bind(*args, **kwargs).arguments
            except TypeError:
                pass
        return {**{f"arg{i}": value for i, value in enumerate(args)}, **kwargs}

    return named


def signature_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """A hashable key: shapes, dtypes and devices of tensors, values of ints, bools and strings, types of the rest."""
    return tuple(_part(value) for value in args), tuple((name, _part(kwargs[name])) for name in sorted(kwargs))


def _part(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple(_part(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((key, _part(item)) for key, item in value.items())
    return (type(value), value) if value is None or isinstance(value, bool | int | str) else type(value)


def bucket_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """``"float16[2^10,2^12] float16[2^12]"``: dtypes, and sizes rounded up to a power of two; at most four tensors."""
    parts = []
    for tensor in tensors_of([args, kwargs])[:_MOST_TENSORS]:
        sizes = ",".join("0" if size == 0 else f"2^{(size - 1).bit_length()}" for size in tensor.shape)
        parts.append(f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]")
    return " ".join(parts) or "no tensor"


def shapes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """Shapes and dtypes, a key for `bucket_of`: 0.35 of the 0.8 us that it takes to count a call of two tensors. Types
    are compared, because ``isinstance`` calls torch's metaclass: 70 ns for an object that is no tensor."""
    parts: list[object] = []
    append = parts.append
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            append(value.shape)
            append(value.dtype)
        elif kind not in _PLAIN:
            for tensor in tensors_of(value):
                append(tensor.shape)
                append(tensor.dtype)
    return tuple(parts) if len(parts) <= _MOST_SHAPES else tuple(parts[:_MOST_SHAPES])


def devices_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[torch.device]:
    return {tensor.device for tensor in tensors_of([args, kwargs])}


def versions_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """The tensors with their counters of in-place writes. Inference tensors have none and are left out."""
    return [(tensor, tensor._version) for tensor in tensors_of([args, kwargs]) if not tensor.is_inference()]


def context_lost(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the CUDA context of a call's tensors is lost."""
    return any(device.type == "cuda" for device in devices_of(args, kwargs)) and cuda_is_poisoned()


# The bucket of all classes that come after the bound is reached.
OTHERS = "others"
# Exact shapes whose bucket is cached; sequences of any length would make them endless.
_MOST_KEYS = 4096


class Ticker:
    """A counter that any thread raises by ``up()``, one atomic step; ``read`` is for one thread at a time."""

    __slots__ = ("_count", "_peeks", "up")

    def __init__(self) -> None:
        self._count = itertools.count()
        self._peeks = 0
        self.up = self._count.__next__

    def read(self) -> int:
        value = next(self._count) - self._peeks
        self._peeks += 1
        return value


@dataclass(slots=True, eq=False)
class Slot:
    """The counters of one bucket in one state. ``unverified`` calls were served by the candidate and not compared."""

    bucket: str
    calls: Ticker = field(default_factory=Ticker)
    candidate: Ticker = field(default_factory=Ticker)
    unverified: Ticker = field(default_factory=Ticker)


class Calls(NamedTuple):
    """Numbers of calls of one bucket in one state. ``unverified`` calls are the candidate's that were not compared."""

    calls: int
    candidate: int
    unverified: int


class Traffic:
    """Counts in at most ``most`` buckets, the last for all others. Any thread may call ``slot``, one ``read``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: dict[object, Slot] = {}
        self._slots: dict[tuple[str, str], Slot] = {}
        self._buckets: set[str] = set()

    def slot(self, state: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Slot:
        """Counts this call, made in ``state``, and returns its counters."""
        try:
            key = state, shapes_of(args, kwargs)
            found = self._known.get(key)
            if found is None:
                found = self._new(key, state, bucket_of(args, kwargs))
        except Exception:  # noqa: BLE001 - counting must not fail a call, e.g. for nested tensors without sizes
            found = self._new(state, state, OTHERS)
        found.calls.up()
        return found

    def _new(self, key: object, state: str, bucket: str) -> Slot:
        with self._lock:
            if bucket not in self._buckets:
                if len(self._buckets) >= self._most - 1:
                    bucket = OTHERS
                self._buckets.add(bucket)
            slot = self._slots.setdefault((state, bucket), Slot(bucket))
            if len(self._known) >= _MOST_KEYS:
                self._known = {}
            self._known[key] = slot
            return slot

    def read(self) -> dict[tuple[str, str], Calls]:
        """The counts so far, by state and bucket."""
        with self._lock:
            slots = dict(self._slots)
        return {
            where: Calls(slot.calls.read(), slot.candidate.read(), slot.unverified.read())
            for where, slot in sorted(slots.items())
        }
