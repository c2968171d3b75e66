"""The base of every dispatch mode here, which is cheap to enter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose handler torch does not wrap: the wrapper imports torch._dynamo, 1.9 s in a forked child."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class OperatorMode(DispatchMode):
    """A mode whose ``on_operator`` runs each operator; higher-order dispatch (``torch.cond``) passes through."""

    supports_higher_order_operators = True

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            return self.on_operator(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))
