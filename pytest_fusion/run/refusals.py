"""Whose code a frame is of; whose own ``assert`` or ``raise`` an exception comes from, found in its traceback."""

from __future__ import annotations

import importlib.util
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache
from opcode import opmap
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from pytest_fusion.spec.wording import origins

Raiser = Literal["", "launcher", "test"]

_RAISE = opmap["RAISE_VARARGS"]
_INSTALLED = ("site-packages", "dist-packages")
# Its asserts say what a descriptor can take of a tensor (16-byte alignment, say): whoever makes one refuses the rest.
_DESCRIPTORS = ("triton", "tools", "tensor_descriptor.py")


# What a kernel's own code calls, and what calls it.
_AROUND_KERNEL = ("/torch/", "/triton/", "/pytest_fusion/run/", "/pytest_fusion/interpreter/", "/pytest_fusion/oracle/")


def around_kernel(file: str) -> bool:
    """Whether a file is of torch, Triton or this package's calls of kernels, or of no file's code."""
    return file.startswith("<") or any(part in file for part in _AROUND_KERNEL)


def raised_by(error: BaseException, fused: Callable[..., Any]) -> Raiser:
    """Whose statement raised: the ``fused`` test's own, a launcher's, or neither. Errors inside torch, Triton, this
    package or the standard library are no refusals, also when they are handled."""
    codes = [_raising(each) for each in origins(error)]
    if None in codes:
        return ""
    own = getattr(fused, "func", fused)  # a bound method of a class of tests
    in_test = getattr(own, "__code__", None) is codes[0] and own.__name__.startswith("test")
    return "test" if in_test else "launcher" if _states(error) else ""


def _raising(error: BaseException) -> CodeType | None:
    """The user's code at the end of the traceback; ``None`` if other code is there."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return None
    code = frames[-1][0].f_code
    return None if _foreign(code.co_filename) else code


def _states(error: BaseException) -> bool:
    """Whether the last instruction is that of a ``raise`` or of an ``assert``."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE


@cache
def _foreign(file: str) -> bool:
    parts = Path(file).parts
    if parts[-3:] == _DESCRIPTORS:
        return False
    standard = parts[: len(_standard())] == _standard() and not set(_INSTALLED) & set(parts)
    return standard or file.startswith("<") or any(parts[: len(other)] == other for other in _packages())


@cache
def _standard() -> tuple[str, ...]:
    return Path(sysconfig.get_paths()["stdlib"]).parts


@cache
def _packages() -> list[tuple[str, ...]]:
    found = map(importlib.util.find_spec, ("torch", "triton", "pytest_fusion"))
    return [Path(str(spec.origin)).parent.parts for spec in found if spec is not None]
