"""Whether a launcher looks at the values of tensors: without its kernels they are not what they would be on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

READS = "the launcher reads values of tensors, which nothing computed here: on a GPU it may launch other sizes"

_VALUES = "item tolist numpy __bool__ __int__ __float__ __index__ nonzero unique masked_select bincount".split()
_FUNCTIONS = "nonzero unique masked_select bincount repeat_interleave".split()


@contextmanager
def values_read() -> Iterator[list[str]]:
    """The names of what reads values, as it is called: scalars taken out, and shapes that depend on values."""
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
