"""The base of every dispatch mode here, which is cheap to enter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fusion.interpreter.bridge.aten import TORCH_NAMESPACES, kernel_key


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


class InnerMode(OperatorMode):
    """An operator mode that can stay active inside a user's custom operator, and inside compiled code."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: otherwise torch.compile silently runs everything eagerly while the mode is active."""
        return True

    def inside(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any], *others: Any
    ) -> Any:
        """Run ``func``; stay active, below the modes ``others``, inside a user's custom operator.

        Torch pops a mode while its handler runs, so for the operator's whole body, where a fused kernel allocates.
        Pushing it and calling the operator would return here; calling the kernel registered for the device does not.
        """
        key = None if func.namespace in TORCH_NAMESPACES else kernel_key(func, types, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        with ExitStack() as stack:
            for mode in (*others, self):
                stack.enter_context(mode)
            return func.redispatch(key, *args, **kwargs)
