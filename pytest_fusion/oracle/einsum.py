"""``torch.einsum`` over a dim of one element as the matrix product that it is of any other size.

ATen leaves out what has one element and multiplies, so that such a case arrived as a product of elements: a kernel that
stores its probabilities in 16 bits before ``torch.einsum("bnm,bme->bne", p, v)`` was accused where ``m`` is 1, and its
backward too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Contracting(TorchFunctionMode):
    """While it is on, ``torch.einsum`` of two tensors is a batched product where ATen would make none of it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = _contracted(args) if func is torch.functional.einsum and not kwargs else None
        return func(*args, **(kwargs or {})) if found is None else found


def _contracted(args: Sequence[Any]) -> Tensor | None:
    """The product, or ``None`` where there is none, it has several terms, or the equation is not a plain one."""
    equation, *rest = args
    operands = rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(t, Tensor) for t in operands):
        return None
    given, arrow, out = equation.replace(" ", "").partition("->")
    names = given.split(",")
    if not arrow:
        out = "".join(sorted(letter for letter in set(given) - {","} if given.count(letter) == 1))
    if len(names) != 2 or not _plain(*names, out):
        return None
    a, b = operands
    left, right = names
    if (len(left), len(right)) != (a.dim(), b.dim()) or not set(out) <= set(left) | set(right):
        return None
    first, second = dict(zip(left, a.shape, strict=True)), dict(zip(right, b.shape, strict=True))
    both = [letter for letter in left if letter in second]
    summed = [letter for letter in both if letter not in out]
    alone = [letter for letter in left + right if letter not in both and letter not in out]
    if not summed or alone or any(first[letter] != second[letter] for letter in both):
        return None
    if math.prod(first[letter] for letter in summed) != 1:
        return None
    batch = [letter for letter in both if letter in out]
    rows, columns = [n for n in left if n not in both], [n for n in right if n not in both]
    size = first | second
    many = math.prod(size[n] for n in batch)
    one = a.permute([left.index(n) for n in (*batch, *rows, *summed)])
    other = b.permute([right.index(n) for n in (*batch, *summed, *columns)])
    made = torch.bmm(
        one.reshape(many, math.prod(size[n] for n in rows), 1),
        other.reshape(many, 1, math.prod(size[n] for n in columns)),
    )
    order = [*batch, *rows, *columns]
    return made.reshape([size[n] for n in order]).permute([order.index(n) for n in out])


def _plain(*names: str) -> bool:
    """Letters, none twice in a tensor: no ellipsis and no diagonal."""
    return all((not name or name.isalpha()) and len(set(name)) == len(name) for name in names)
