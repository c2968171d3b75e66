"""One operation of somebody else's package: how to call it, and what it should have computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Relative to the largest element. A few roundings of the dtype (unit roundoffs 6e-8, 5e-4, 4e-3): packages round
# intermediate results where their casting conventions say so. `Op.slack` widens it where a kernel says that it computes
# in a narrower type.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Draw:
    """Makes the inputs of one call: every call with the same dtype draws the same numbers."""

    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed numbers, rounded to the dtype under test."""
        return (torch.randn(shape, generator=self.generator) * scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Uniformly distributed numbers, rounded to the dtype under test."""
        return (torch.rand(shape, generator=self.generator) * (high - low) + low).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers of ``[low, high)``."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def mask(self, *shape: int) -> Tensor:
        """Booleans, half of them true."""
        return torch.rand(shape, generator=self.generator) < 0.5

    def permutation(self, n: int) -> Tensor:
        """``0 ... n - 1`` in some order."""
        return torch.randperm(n, generator=self.generator)


@dataclass(frozen=True, slots=True)
class Op:
    """``run(*inputs)`` is the package's; ``reference(*inputs)`` gets the same numbers in float64.

    ``gradients`` are the positions of the inputs whose gradients are compared too. ``covers`` are the public names that
    the entry stands for, ``[name]`` unless told. ``bugs`` maps a dtype's name to what is known to be wrong in the
    package there, with evidence; ``absent`` says why a dtype (or ``"all"``) cannot run.
    """

    name: str
    inputs: Callable[[Draw], Sequence[Any]]
    run: Callable[..., Any]
    reference: Callable[..., Any]
    gradients: tuple[int, ...] = ()
    slack: float = 1.0
    covers: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    absent: dict[str, str] = field(default_factory=dict)
    bugs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Package:
    """What a module of this folder says about one package; ``ops`` is called once the package can be imported."""

    title: str
    distribution: str
    ops: Callable[[], list[Op]]
    total: Callable[[], int]
    others: Callable[[], dict[str, list[str]]]
