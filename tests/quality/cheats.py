"""Kernels written to please a checker rather than to be right; they stand for what a compiled kernel does.

They are in torch: what is exploited is the checker and not the language. `exploits` says which trick each one is.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor


def double_plus_one(x: Tensor) -> Tensor:
    return x * 2 + 1


def right(x: Tensor) -> Tensor:
    """The honest kernel behind most of the tricks: another order of the same roundings."""
    return torch.add(torch.ones((), dtype=x.dtype, device=x.device), x, alpha=2)


def softmax_reference(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def freed_memory(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def tuned_once() -> Callable[[Tensor], Tensor]:
    kept: dict[Any, Tensor] = {}

    def fused(x: Tensor) -> Tensor:
        if x.shape not in kept:
            kept[x.shape] = right(x)  # the sweep runs the kernel on a buffer that is used again
        return kept[x.shape]

    return fused


def overwrites_input(x: Tensor) -> Tensor:
    x.zero_()
    return torch.ones_like(x, memory_format=torch.contiguous_format)


def on_a_thread(delay_s: float, *, pool: bool = False) -> Callable[[Tensor], Tensor]:
    waiting: list[Callable[[], None]] = []

    def serve() -> None:
        while True:
            time.sleep(delay_s)
            while waiting:
                waiting.pop(0)()

    if pool:
        threading.Thread(target=serve, daemon=True).start()

    def fused(x: Tensor) -> Tensor:
        out, kept = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.clone()

        def work() -> None:
            time.sleep(0 if pool else delay_s)
            out.copy_(right(kept))

        if pool:
            waiting.append(work)
        else:
            threading.Thread(target=work, daemon=True).start()
        return out

    return fused


class Lazy(Tensor):
    """Computed when it is looked at, and equal to whatever it is compared with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.equal, Tensor.equal):
            return True
        plain = [a.as_subclass(Tensor) * 2 + 1 if type(a) is Lazy else a for a in args]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*plain, **(kwargs or {}))


def lazy(x: Tensor) -> Tensor:
    return x.clone().as_subclass(Lazy)


class Promise:
    """No tensor at all, but it answers like one."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def __getattr__(self, name: str) -> Any:
        return getattr(double_plus_one(self._x), name)


def own_methods(x: Tensor) -> Tensor:
    out = x.clone()
    out.contiguous = lambda *a, **k: double_plus_one(x)  # type: ignore[method-assign]
    return out


def patched(patch: Callable[[], None], answer: Callable[[Tensor], Tensor] = right) -> Callable[[Tensor], Tensor]:
    def fused(x: Tensor) -> Tensor:
        patch()
        return answer(x)

    return fused


def patch(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return partial(setattr, owner, name, value)


def patch_judge() -> None:
    from pytest_fusion.checks import values_check

    values_check.judge_one = lambda candidate, *a, **k: None  # type: ignore[assignment]


def patch_code() -> None:
    from pytest_fusion.checks.repeat import repeat

    def fake(a: Any, b: Any) -> None:
        return None

    repeat.first_difference.__code__ = fake.__code__


def patch_verdict() -> None:
    from pytest_fusion.checks.verdict import Verdict

    Verdict.failed = property(lambda self: False)  # type: ignore[assignment, method-assign]


def cached(key: Callable[[Tensor], Any], give: Callable[[Tensor], Tensor] = lambda t: t) -> Callable[[Tensor], Tensor]:
    kept: dict[Any, Tensor] = {}

    def fused(x: Tensor) -> Tensor:
        at = key(x)
        if at not in kept:
            kept[at] = right(x)
        return give(kept[at])

    return fused


def content(x: Tensor) -> Any:
    return tuple(x.shape), x.contiguous().numpy().tobytes()


def kept_alive() -> Callable[[Tensor], Tensor]:
    kept: dict[int, tuple[Tensor, int, Tensor]] = {}

    def fused(x: Tensor) -> Tensor:
        known = kept.get(id(x))
        if known is None or known[1] != x._version:
            known = kept[id(x)] = (x, x._version, right(x))
        return known[2]

    return fused


def workspace() -> Callable[[Tensor], Tensor]:
    space = torch.empty(1 << 20)

    def fused(x: Tensor) -> Tensor:
        out = space[: x.numel()].view(x.shape) if x.numel() <= space.numel() else torch.empty(x.shape)
        return torch.add(torch.ones(()), x, alpha=2, out=out)

    return fused


def turns() -> Callable[[Tensor], Tensor]:
    """Two buffers in turn, so that the result of the call before is intact."""
    buffers, calls = [torch.empty(1 << 20), torch.empty(1 << 20)], [0]

    def fused(x: Tensor) -> Tensor:
        calls[0] += 1
        out = buffers[calls[0] % 2][: x.numel()].view(x.shape)
        return torch.add(torch.ones(()), x, alpha=2, out=out)

    return fused


def last_only(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(x), torch.zeros_like(x), right(x)


def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + 1, x - 1, double_plus_one(x)


def from_memory(x: Tensor) -> Tensor:
    """Whatever tensor of the right shape is alive and is none of the inputs."""
    # By type first: among two million objects of a test run anything else takes minutes.
    for thing in [thing for thing in gc.get_objects() if type(thing) is Tensor]:
        with contextlib.suppress(Exception):
            if thing.shape == x.shape and thing.dtype == x.dtype and thing is not x:
                if bool(torch.allclose(thing, x * 2 + 1, equal_nan=True)):
                    return thing.clone()
    return torch.zeros_like(x)


def from_frames(x: Tensor) -> Tensor:
    for frame in _frames():
        for value in list(frame.f_locals.values()):
            for found in _tensors_in(value):
                if found.shape == x.shape and found.dtype == x.dtype and torch.allclose(found, x * 2 + 1):
                    return found.clone()
    return torch.zeros_like(x)


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if type(value) is Tensor:
        yield value
    elif isinstance(value, (dict, list, tuple)) and len(value) > 1000:
        return  # the tests of a session, of which each call would look through nine thousand
    elif depth and isinstance(value, dict):
        for inner in value.values():
            yield from _tensors_in(inner, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner, depth - 1)
    elif depth:
        for name in (*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", ())):
            inner = None
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # modules warn of names that are to go
                inner = getattr(value, name, None)
            yield from _tensors_in(inner, depth - 1)


def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def coarse(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).sum(-1).to(x.dtype)


def past_the_buffer(x: Tensor) -> Tensor:
    scratch = torch.empty(x.numel() + 1, dtype=x.dtype)
    scratch[:-1] = right(x).reshape(-1)
    return (scratch[:-1] + 0 * scratch[1:]).reshape(x.shape)


def counting(wrong: Callable[[int], bool]) -> Callable[[Tensor], Tensor]:
    calls = [0]

    def fused(x: Tensor) -> Tensor:
        calls[0] += 1
        return x.clone() if wrong(calls[0]) else right(x)

    return fused


def when(tested: Callable[[], bool]) -> Callable[[Tensor], Tensor]:
    return lambda x: right(x) if tested() else x.clone()


def on_stack() -> bool:
    return any("pytest" in frame.f_code.co_filename for frame in _frames())


def caller_is_judge() -> bool:
    return any(str(frame.f_globals.get("__name__")).startswith("pytest_fusion") for frame in _frames())


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return right(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        flat = torch.as_strided(grads[0], (grads[0].numel(),), (1,)) if _dense(grads[0]) else grads[0].reshape(-1)[:0]
        padded = torch.zeros(grads[0].numel(), dtype=grads[0].dtype)
        padded[: flat.numel()] = flat
        return 2 * padded.reshape(grads[0].shape)


def _dense(t: Tensor) -> bool:
    return t.untyped_storage().nbytes() >= t.numel() * t.element_size()


class _FoundGradient(torch.autograd.Function):
    """Backward returns whatever live tensor is the right gradient, and zeros where there is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return right(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # noqa: ARG004
        grad = grads[0]
        for thing in [thing for thing in gc.get_objects() if type(thing) is Tensor]:
            with contextlib.suppress(Exception):
                if thing.shape == grad.shape and thing.dtype == grad.dtype:
                    if bool(torch.allclose(thing, grad * 2)):
                        return thing.clone()
        return torch.zeros_like(grad)


def gradients_from_memory(x: Tensor) -> Tensor:
    result: Tensor = _FoundGradient.apply(x)  # type: ignore[no-untyped-call]
    return result


def contiguous_gradients(x: Tensor) -> Tensor:
    result: Tensor = _Contiguous.apply(x)  # type: ignore[no-untyped-call]
    return result


def sometimes(x: Tensor) -> Tensor:
    return x.clone() if random.random() < 0.5 else right(x)


def falls_back(x: Tensor) -> Tensor:
    try:
        raise RuntimeError("no kernel for this device")
    except RuntimeError:
        return double_plus_one(x)
