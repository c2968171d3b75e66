"""A call as text for a process without interpreter and GPU, in which a launcher chooses what it chooses on a GPU.

Functions and kernels that have a name in a module are imported there anew; closures, which have none, are sent as they
are (cloudpickle). Tensors are sent by their form, those of integers with their values.
"""

from __future__ import annotations

import base64
import functools
import importlib
import importlib.util
import io
import pickle
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

from pytest_fusion.case import blank
from pytest_fusion.run.measure.resources.specialiser import unwrapped
from pytest_fusion.spec.wording import first_line

# Launchers read small tensors of integers (lengths, offsets, experts) to size their grids: those keep their values.
_MOST_VALUES = 1 << 14


class NotSentError(Exception):
    """A function or value cannot be sent, or not be made again; the text says why."""


def as_text(value: Any) -> str:
    """The value as ASCII text for :func:`from_text`. Raises ``NotSentError``."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:
        raise NotSentError(f"the call cannot be sent to another process: {first_line(error)}") from error
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def from_text(text: str) -> Any:
    """The value that :func:`as_text` was given, its floating tensors zeros in host memory. Raises ``NotSentError``."""
    try:
        return pickle.loads(base64.b64decode(text))
    except NotSentError:
        raise
    except Exception as error:
        raise NotSentError(f"the call cannot be made here: {type(error).__name__}: {first_line(error)}") from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _tensor, _form(value)
        plain = unwrapped(value)
        if not isinstance(plain, FunctionType) or plain.__module__ == __name__:
            return super().reducer_override(value)
        module = sys.modules.get(plain.__module__)
        path = _path_in(module, value, plain.__qualname__)
        if module is not None and path is not None:
            return _imported, (module.__name__, path, module.__file__)
        if value is not plain and isinstance(getattr(value, "kwargs", None), dict):
            return _kernel, (plain, plain.__code__.co_filename, value.kwargs)
        return super().reducer_override(value)


def _path_in(module: ModuleType | None, value: Any, name: str) -> str | None:
    """The dotted path to ``value`` from a module that another process can import; ``None`` where there is none."""
    if module is None or module.__name__ == "__main__" or not getattr(module, "__file__", None):
        return None
    names = [name, *(other for other, known in vars(module).items() if known is value)]
    return next((path for path in names if _follow(module, path) is value), None)


def _follow(module: Any, path: str) -> Any:
    return functools.reduce(lambda owner, name: getattr(owner, name, None), path.split("."), module)


def _imported(name: str, path: str, file: str) -> Any:
    """The object at ``path`` of the module ``name``, which ``file`` defines where no module has that name. Raises
    ``NotSentError``, with the error of the module itself."""
    try:
        try:
            module = sys.modules.get(name) or importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            module = _from_file(name, file)
        if Path(str(module.__file__)).resolve() != Path(file).resolve():
            module = _from_file(name, file)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise NotSentError(
            f"{file} cannot be imported outside of the interpreter and without a GPU: {type(error).__name__}: {error}"
        ) from error
    value = _follow(module, path)
    if value is None:
        raise NotSentError(f"{name} has no {path} when it is imported outside of the interpreter")
    return value


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


def _kernel(function: FunctionType, file: str, options: dict[str, Any]) -> Any:
    import triton

    # Triton reads the source of a kernel, and cloudpickle says of none where it is from.
    function.__code__ = function.__code__.replace(co_filename=file)
    return triton.jit(function, **options)


def _form(value: torch.Tensor) -> tuple[Any, ...]:
    whole = not value.dtype.is_floating_point and not value.dtype.is_complex and value.numel() <= _MOST_VALUES
    # What of the offset decides how the first element is aligned; storages themselves are aligned as on a GPU.
    offset = value.storage_offset() % 128
    values = value.detach().cpu().reshape(-1).tolist() if whole else None
    return value.dtype, tuple(value.shape), value.stride(), offset, values


def _tensor(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, values: list[Any] | None
) -> torch.Tensor:
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
    tensor = blank.zeros((offset + reach,), dtype).as_strided(shape, strides, offset)
    if values is not None and not any(stride == 0 for stride in strides):
        tensor.copy_(torch.tensor(values, dtype=dtype).reshape(shape))
    return tensor
