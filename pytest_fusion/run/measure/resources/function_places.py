"""Where another process finds a function or kernel by importing its module; values of a launch as JSON."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pytest_fusion.case import blank, value_json
from pytest_fusion.errors import ReplayError
from pytest_fusion.run.measure.resources.specialisation import Json, Place
from pytest_fusion.spec.importable import at, path_of

# An autotuner around heuristics around a kernel is three.
_MOST_WRAPPED = 8
_FOREIGN = ("torch", "triton", "numpy")


class NotFoundError(Exception):
    """Another process cannot find or make a function or value; the text says why and what helps."""


def unwrapped(value: Any) -> Any:
    """The function inside a kernel and Triton's wrappers around it; any other value itself."""
    for _ in range(_MOST_WRAPPED):
        if not _tritons(value) or not hasattr(value, "fn"):
            break
        value = value.fn
    return value


def _tritons(value: Any) -> bool:
    """Whether Triton made the type; a metaclass may make a type's module a descriptor."""
    module = type(value).__module__
    return isinstance(module, str) and module.startswith("triton.")


def kernel_of(value: Any) -> Any:
    """The kernel inside autotuners and heuristics: the innermost object of Triton's."""
    for _ in range(_MOST_WRAPPED):
        inner = getattr(value, "fn", None)
        if inner is None or not _tritons(inner):
            break
        value = inner
    return value


def place_of(function: Any) -> Place:
    """Where an importable module has ``function``, plain or a kernel, by name. Raises ``NotFoundError``."""
    plain = unwrapped(function)
    code = getattr(plain, "__code__", None)
    name = getattr(plain, "__qualname__", type(plain).__name__)
    home = str(getattr(plain, "__module__", None))
    for module, path in _reached(plain, home, name):
        if module.__name__ == "__main__" or not _file_of(module):
            raise NotFoundError(
                f"{name} is defined in {module.__name__}, which another process cannot import; put it into a module"
            )
        return Place(module.__name__, path, _file_of(module), code.co_firstlineno if code else 0)
    if "<locals>" in name:
        raise NotFoundError(
            f"{name} is made inside a function and has no name in a module, so another process cannot make it again; "
            "define it at the top level of a module, or assign it to a name there"
        )
    raise NotFoundError(f"{name} is not to be found in its module {home}; assign it to a name there")


def _file_of(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or "")


def _reached(plain: Any, home: str, name: str) -> Iterator[tuple[ModuleType, str]]:
    """Modules and dotted paths that lead to ``plain``, the defining module first."""
    module = sys.modules.get(home)
    if module is not None:
        if "<locals>" not in name:
            yield from ((module, path) for path in _decorated(_follow(module, name), plain, name))
        yield from ((module, path) for path in _named(module, plain))
    for other in tuple(sys.modules.values()):
        if other is not module and isinstance(other, ModuleType) and not other.__name__.startswith(_FOREIGN):
            yield from ((other, path) for path in _named(other, plain))


def _decorated(value: Any, plain: Any, path: str) -> Iterator[str]:
    """The path from ``value`` to ``plain``: itself, or inside a spec or decorators that expose what they wrap."""
    for _ in range(_MOST_WRAPPED):
        if value is None or unwrapped(value) is plain:
            break
        if type(value).__name__ == "FusionSpec":
            value, path = value.fused, f"{path}.fused"
        else:
            value, path = getattr(value, "__wrapped__", None), f"{path}.__wrapped__"
    if value is not None and unwrapped(value) is plain:
        yield path


def _named(module: ModuleType, plain: Any) -> Iterator[str]:
    for name, value in tuple(vars(module).items()):
        if unwrapped(value) is plain:
            yield name
        elif type(value).__name__ == "FusionSpec":
            yield from _decorated(value, plain, name)


def _follow(module: Any, path: str) -> Any:
    # Only the class's own dict has a staticmethod with its descriptor.
    return functools.reduce(lambda owner, name: getattr(owner, name, None), path.split("."), module)


def imported(name: str, file: str) -> ModuleType:
    """The module called ``name``, imported by name or else from ``file``. Raises ``NotFoundError`` with its error."""
    known = sys.modules.get(name)
    if known is not None and _same(_file_of(known), file):
        return known
    try:
        try:
            module = importlib.import_module(name)
            if _same(_file_of(module), file):
                return module
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
        return _from_file(name, file)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise NotFoundError(
            f"{file} cannot be imported outside of the interpreter and without a GPU: {type(error).__name__}: {error}"
        ) from error


def _from_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _same(left: str, right: str) -> bool:
    return bool(left) and Path(left).resolve() == Path(right).resolve()


def found(place: Place) -> Any:
    """The function or kernel at ``place``, imported here. Raises ``NotFoundError``."""
    value = _follow(imported(place.module, place.file), place.path)
    if value is None:
        raise NotFoundError(f"{place.module} has no {place.path} when it is imported outside of the interpreter")
    code = getattr(unwrapped(value), "__code__", None)
    if code is not None and place.line and code.co_firstlineno != place.line:
        raise NotFoundError(
            f"{place.path} of {place.module} is another function, of line {code.co_firstlineno} instead of "
            f"{place.line}, when it is imported outside of the interpreter"
        )
    return value


# Launchers read small integer tensors (lengths, offsets, experts) to size their grids: those keep their values.
_MOST_VALUES = 1 << 14


def encode(value: Any) -> Json:
    """The JSON of a value; raises ``NotFoundError`` if it has none."""
    return value_json.encode(value, _special, _refuse)


def decode(data: Json) -> Any:
    """The value from :func:`encode`, with kernels imported here and zero tensors. Raises ``NotFoundError``."""
    try:
        return value_json.decode(data, _made)
    except ReplayError as error:
        raise NotFoundError(str(error)) from None


def _special(value: Any) -> Any:
    """JSON for the kinds that drawn values never have; ``NotImplemented`` for the others."""
    kind = type(value)
    match value:
        case tuple() if hasattr(value, "_fields"):
            return {"named": _class(kind), "items": [encode(item) for item in value]}
        case functools.partial():
            keywords = {name: encode(item) for name, item in value.keywords.items()}
            return {"partial": encode(value.func), "args": [encode(item) for item in value.args], "keywords": keywords}
        case types.FunctionType():
            return {"kernel": asdict(place_of(value))}
        case torch.Tensor():
            return {"tensor": _form(value)}
        case dict() if not all(isinstance(key, str) for key in value):
            return {"mapping": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind.__module__.startswith("triton."):
        if kind.__name__ == "dtype":
            return {"triton_dtype": str(value.name)}
        if kind.__name__ == "constexpr":
            return {"constexpr": encode(value.value)}
        if hasattr(value, "fn"):
            return {"kernel": asdict(place_of(value))}
    return NotImplemented


def _refuse(value: Any) -> Any:
    """Raises ``NotFoundError``."""
    raise NotFoundError(f"{value!r} of type {type(value).__name__} cannot be handed to another process")


def _made(data: Any) -> Any:
    """The inverse of `_special`; ``NotImplemented`` for other JSON."""
    match data:
        case {"named": str(path), "items": list(items)}:
            return at(path)(*map(decode, items))
        case {"partial": function, "args": list(items), "keywords": dict(keywords)}:
            given = {name: decode(item) for name, item in keywords.items()}
            return functools.partial(decode(function), *map(decode, items), **given)
        case {"triton_dtype": str(name)}:
            import triton.language as tl

            return tl.dtype(name)
        case {"constexpr": value}:
            import triton.language as tl

            return tl.constexpr(decode(value))
        case {"kernel": dict(place)}:
            return found(Place(**place))
        case {"tensor": dict(form)}:
            return _zeros(form)
        case {"mapping": list(pairs)}:
            return {decode(key): decode(item) for key, item in pairs}
    return NotImplemented


def _class(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise NotFoundError(f"the class {kind.__qualname__} is made inside a function; define it in a module")
    return path_of(kind)


def _form(value: torch.Tensor) -> dict[str, Json]:
    whole = not value.dtype.is_floating_point and not value.dtype.is_complex and value.numel() <= _MOST_VALUES
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "strides": list(value.stride()),
        # This part decides the alignment of the first element; storages themselves are aligned as on a GPU.
        "offset": value.storage_offset() % 128,
        "values": value.detach().cpu().reshape(-1).tolist() if whole else None,
    }


def _zeros(form: dict[str, Any]) -> torch.Tensor:
    shape, strides, offset = form["shape"], form["strides"], int(form["offset"])
    dtype = getattr(torch, form["dtype"])
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
    tensor = blank.zeros((offset + reach,), dtype).as_strided(shape, strides, offset)
    if form["values"] is not None and not any(stride == 0 for stride in strides):
        tensor.copy_(torch.tensor(form["values"], dtype=dtype).reshape(shape))
    return tensor
