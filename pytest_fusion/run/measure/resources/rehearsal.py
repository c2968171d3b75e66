"""Which kernels a launcher launches on a GPU, with which arguments, found without a GPU and without the interpreter.

Tensors are in host memory and pose as on a device; kernels are skipped. So a launcher chooses the tiles and configs of
a GPU, which may differ from those under the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from pytest_fusion.case import blank
from pytest_fusion.case.containers import tensors_of
from pytest_fusion.run.measure.resources.noting import Noted, noted
from pytest_fusion.run.measure.resources.sent_call import as_text, from_text

READS = "the launcher reads values of tensors, which nothing computed here: on a GPU it may launch other sizes"

_VALUES = "item tolist numpy __bool__ __int__ __float__ __index__ nonzero unique masked_select bincount".split()
_FUNCTIONS = "nonzero unique masked_select bincount repeat_interleave".split()


@contextmanager
def values_read() -> Iterator[list[str]]:
    """The names of calls that read values: scalars, and shapes that depend on values."""
    read: list[str] = []
    with ExitStack() as stack:
        for owner, names in ((torch.Tensor, _VALUES), (torch, _FUNCTIONS)):
            for name in names:
                replacement = _noting(getattr(owner, name), name, read)
                stack.enter_context(patch.object(owner, name, replacement))
        stack.enter_context(patch.object(torch.Tensor, "__getitem__", _indexing(torch.Tensor.__getitem__, read)))
        yield read


def _noting(upstream: Callable[..., Any], name: str, read: list[str]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def note(*args: Any, **kwargs: Any) -> Any:
        read.append(name)
        return upstream(*args, **kwargs)

    return note


def _indexing(upstream: Callable[..., Any], read: list[str]) -> Callable[..., Any]:
    def index(tensor: torch.Tensor, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in keys):
            read.append("a mask as an index")
        return upstream(tensor, key)

    return index


_FACTORIES = (
    "arange as_tensor empty_permuted empty_strided eye full full_like linspace ones ones_like rand rand_like randint "
    "randint_like randn randn_like randperm scalar_tensor tensor"
).split()
# A launcher that reads uninitialised integers as sizes could allocate any amount of memory.
_BLANK = "empty empty_like zeros zeros_like".split()
_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()


def sent(function: Any, arguments: Mapping[str, Any], backward: tuple[str, ...]) -> str:
    """A call for :func:`rehearse`; ``backward``: the gradients of these too. Raises ``NotSentError``."""
    return as_text((function, dict(arguments), backward))


def rehearse(call: str) -> tuple[list[Noted], str, bool]:
    """The launches of one call, why there may be more (what it raised, or empty), and whether it read values. None of
    the kernels runs. Raises ``NotSentError`` where the call cannot be made here."""
    function, arguments, backward = from_text(call)
    for name in backward:
        if isinstance(arguments.get(name), torch.Tensor) and arguments[name].dtype.is_floating_point:
            arguments[name].requires_grad_()
    launches: list[Noted] = []
    problem = ""
    with posing_as_device(), values_read() as read, noted(launches, run=False):
        try:
            result = function(**arguments)
            if backward:
                _backward(result, [leaf for leaf in arguments.values() if getattr(leaf, "requires_grad", False)])
        except Exception as error:  # noqa: BLE001 - the call goes on without its kernels: it may meet anything
            problem = f"{type(error).__name__}: {error}"
    return launches, problem, bool(read)


def _backward(result: Any, leaves: list[torch.Tensor]) -> None:
    """Run backward with zero upstream gradients; ``autograd.grad``, as ``backward`` would copy into ``.grad``."""
    wanted = [output for output in tensors_of(result) if output.requires_grad]
    if wanted and leaves:
        torch.autograd.grad(wanted, leaves, [torch.zeros_like(output) for output in wanted], allow_unused=True)


@contextmanager
def posing_as_device() -> Iterator[None]:
    """Host tensors pose as on ``cuda:0``; tensors for that device are made in host memory."""
    device = torch.device("cuda", 0)
    with ExitStack() as stack:
        for name, value in (
            ("device", property(lambda tensor: device)),
            ("is_cuda", property(lambda tensor: True)),
            ("is_cpu", property(lambda tensor: False)),
            ("get_device", lambda tensor: 0),
            ("cuda", lambda tensor, *_, **__: tensor),
            ("to", _moved(torch.Tensor.to)),
            *((name, _on_host(getattr(torch.Tensor, name))) for name in _METHODS),
        ):
            stack.enter_context(patch.object(torch.Tensor, name, value, create=True))
        for name in _FACTORIES:
            stack.enter_context(patch.object(torch, name, _on_host(getattr(torch, name))))
        for name in _BLANK:
            stack.enter_context(patch.object(torch, name, _blank(getattr(torch, name))))
        yield


def _on_host(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        return upstream(*args, **kwargs)

    return make


def _blank(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """Zeros instead of any factory's values: only written pages take memory."""

    @functools.wraps(upstream)
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            return upstream(*args, **kwargs).zero_()
        kwargs.pop("pin_memory", None)
        return blank.like(upstream(*args, **{**kwargs, "device": "meta"}))

    return make


def _moved(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        if args and isinstance(args[0], str | torch.device | int):
            args = args[1:]
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].dtype, *args[1:])
        kwargs.pop("other", None)
        rest = {name: value for name, value in kwargs.items() if name != "non_blocking"}
        args = tuple(argument for argument in args if not isinstance(argument, bool))
        return upstream(tensor, *args, **rest) if args or rest else tensor

    return move
