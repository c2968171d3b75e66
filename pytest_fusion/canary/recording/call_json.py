"""`DescribedCall`: a call as JSON: arguments by name, tensors as shape, strides, alignment, dtype and summary."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_fusion.canary.live.calls.captures import Readback
from pytest_fusion.case.value_json import encode

# Elements that are read, evenly spaced: a few milliseconds on a CPU, 20 MiB on a device for a moment.
MOST = 1 << 18
FIELDS = ("seen", "finite", "zeros", "nan", "inf", "ninf", "low", "high", "mean", "rms", "absolute")
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


@torch.no_grad()
def summary_of(tensor: Tensor) -> Tensor | None:
    """A float64 row of ``FIELDS`` on the tensor's device, ``None`` if empty; does not wait. Counts are of ``seen``
    elements, ``low`` to ``absolute`` (mean magnitude) of finite ones, ranges of integers of all. A complex number
    counts twice."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.numel():
        return None
    part = _spaced(values)
    x = (part.to(torch.float32) if part.dtype.itemsize == 1 else part).to(torch.float64)
    finite = torch.isfinite(x)
    count = finite.sum()
    finite_values = torch.where(finite, x, 0.0)
    divisor = count.clamp_min(1)
    if values.dtype in _SIGNED:
        low, high = values.amin(), values.amax()
    else:
        low, high = torch.where(finite, x, math.inf).amin(), torch.where(finite, x, -math.inf).amax()
    found = (
        torch.full((), x.numel(), dtype=torch.float64, device=x.device),
        count,
        (x == 0).sum(),
        torch.isnan(x).sum(),
        (x == math.inf).sum(),
        (x == -math.inf).sum(),
        low,
        high,
        finite_values.sum() / divisor,
        (finite_values.square().sum() / divisor).sqrt(),
        finite_values.abs().sum() / divisor,
    )
    return torch.stack([one.to(torch.float64) for one in found])


def _spaced(values: Tensor) -> Tensor:
    """A view of at most about ``MOST`` elements, evenly spaced."""
    while values.numel() > MOST:
        axis = max(range(values.dim()), key=values.size)
        step = min(-(-values.numel() // MOST), values.size(axis))
        if step < 2:
            break
        values = values[(slice(None),) * axis + (slice(None, None, step),)]
    return values


def read(row: Tensor) -> dict[str, float]:
    """The numbers of a row by name, counts as shares; without a range where nothing is finite."""
    found = dict(zip(FIELDS, row.tolist(), strict=True))
    seen = found["seen"]
    shares = {name: found[name] / seen for name in ("zeros", "nan", "inf", "ninf")}
    if not found["finite"]:
        return {"seen": seen, **shares}
    numbers = {name: found[name] for name in ("low", "high", "mean", "rms", "absolute")}
    return {"seen": seen, **shares, **{name: value for name, value in numbers.items() if math.isfinite(value)}}


# Addresses are recorded modulo this: allocations of CUDA begin at multiples of it.
ALIGNED = 512
_MOST_TENSORS = 64
_MOST_ITEMS = 64
_DEEPEST = 6
# The name of a kernel's mode is short; a longer string may be private text.
_LONGEST_TEXT = 80


class CannotDescribeError(Exception):
    """The call has too many or too deeply nested tensors for a line of a file."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Arguments by parameter; those in ``defaults`` were not passed and have the default value."""

    arguments: Mapping[str, Any]
    defaults: frozenset[str] = frozenset()


class Binding:
    """Maps a call's arguments to parameters, with defaults; ``arg0``, ... where the signature is not known."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):
            self._signature = None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound:
        """The arguments by parameter. Raises ``CannotDescribeError`` if the function does not take them."""
        if self._signature is None:
            return Bound({**{f"arg{i}": value for i, value in enumerate(args)}, **kwargs})
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            raise CannotDescribeError("the function does not take these arguments") from None
        given = set(bound.arguments)
        bound.apply_defaults()
        found: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                found.update(value)
            elif kind is not inspect.Parameter.VAR_POSITIONAL or value:
                found[name] = value
        return Bound(found, frozenset(found.keys() - given - kwargs.keys()))


class DescribedCall:
    """A call's description; it holds no reference to an argument, and creating it waits for no device. ``tensors``
    within ``keep_bytes`` are contiguous copies by path (``"x"``, ``"caches[0]"``). Raises ``CannotDescribeError``."""

    def __init__(self, bound: Bound, *, keep_bytes: float = 0.0) -> None:
        self._nodes: list[dict[str, Any]] = []
        self._rows: list[Tensor] = []
        self._found: dict[str, Tensor] = {}
        self._storages: dict[int, int] = {}
        self._tensors = 0
        # Subclasses (weights of a serving engine) may override operations; use those of Tensor.
        with torch._C.DisableTorchFunctionSubclass():
            self._arguments = {name: self._node(value, name, 0) for name, value in bound.arguments.items()}
        for name in bound.defaults:
            self._arguments[name]["default"] = True
        size = sum(t.numel() * t.element_size() for t in self._found.values())
        self.too_large = keep_bytes > 0 and size > keep_bytes
        self.held_bytes = size if keep_bytes and not self.too_large else 0
        copied = self._found if keep_bytes and not self.too_large else {}
        with torch.no_grad():
            copies = [t.detach().clone(memory_format=torch.contiguous_format) for t in copied.values()]
        self._readback = Readback([*self._rows, *copies])
        self._paths = tuple(copied)
        self._found.clear()
        self._rows.clear()

    @property
    def ready(self) -> bool:
        return self._readback.done

    @property
    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self._paths, self._readback.host[len(self._nodes) :], strict=True))

    def arguments(self) -> dict[str, Any]:
        """The arguments in JSON types; complete when ``ready``."""
        for node, row in zip(self._nodes, self._readback.host, strict=False):
            node["values"] = read(row)
        return self._arguments

    def _node(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if depth > _DEEPEST:
            raise CannotDescribeError(f"{path} is nested more than {_DEEPEST} deep")
        if isinstance(value, tuple | list) and len(value) <= _MOST_ITEMS and _holds_tensors(value):
            items = [self._node(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
            return {"items": items, "of": type(value).__name__}
        if isinstance(value, Mapping) and len(value) <= _MOST_ITEMS and _holds_tensors(list(value.values())):
            return {"entries": {str(k): self._node(item, f"{path}[{k!r}]", depth + 1) for k, item in value.items()}}
        return _plain(value)

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        self._tensors += 1
        if self._tensors > _MOST_TENSORS:
            raise CannotDescribeError(f"more than {_MOST_TENSORS} tensors")
        node: dict[str, Any] = {
            "tensor": list(map(int, value.shape)),
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": value.device.type,
            "grad": value.requires_grad,
        }
        # Operations on a subclass with its own dispatch may involve other processes (DTensor).
        if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__ or value.layout is not torch.strided:
            return {**node, "of": type(value).__name__}
        value = value.detach().as_subclass(Tensor)
        storage = self._storages.setdefault(value.untyped_storage().data_ptr(), len(self._storages))
        node |= {
            "strides": list(map(int, value.stride())),
            "offset": int(value.storage_offset()),
            "pointer": value.data_ptr() % ALIGNED,
            "storage": storage,
        }
        if value.device.type in ("cpu", "cuda"):
            try:
                row = summary_of(value)
            except (RuntimeError, NotImplementedError) as error:
                node["unread"] = type(error).__name__
                row = None
            if row is not None:
                self._nodes.append(node)
                self._rows.append(row)
            self._found[path] = value
        return node


def _holds_tensors(values: tuple[Any, ...] | list[Any]) -> bool:
    return any(isinstance(value, Tensor | tuple | list | Mapping) for value in values)


def _plain(value: Any) -> dict[str, Any]:
    """A value without tensors as JSON; only its type if a case cannot hold it, as it may be private."""
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return {"other": f"str of {len(value)}"}
    if isinstance(value, tuple | list | Mapping) and len(value) > _MOST_ITEMS:
        return {"other": f"{type(value).__name__} of {len(value)}"}
    encoded = encode(value)
    return {"other": type(value).__qualname__} if _opaque(encoded) else {"value": encoded}


def _opaque(encoded: Any) -> bool:
    if isinstance(encoded, list):
        return len(encoded) > _MOST_ITEMS or any(map(_opaque, encoded))
    if isinstance(encoded, str):
        return len(encoded) > _LONGEST_TEXT
    return isinstance(encoded, dict) and ("opaque" in encoded or any(map(_opaque, encoded.values())))
