"""The functions that rewritten kernels call at run time (``rewrite`` inserts the calls)."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.control import batch
from pytest_fusion.interpreter.control.batch import NotBatchedError
from pytest_fusion.interpreter.control.predication import (
    MISSING,
    NEITHER,
    NOT_TAKEN,
    TAKEN,
    Branch,
    Frame,
    Loop,
    Merger,
)


class KernelRuntime:
    """Python's control flow and logic, for tensors that represent many programs. Built once per process."""

    def __init__(self, tl: Any, semantic: Any, handle: Any, chained_comparisons: bool) -> None:
        self._tl = tl
        self._semantic = semantic
        self._merger = Merger(tl, handle, semantic)
        self._handle = handle
        self.chained_comparisons = chained_comparisons
        self.missing = MISSING

    def assign(self, value: Any) -> Any:
        """The value of ``name = value``: Python numbers become tensors, also inside a tuple, as when compiled."""
        if isinstance(value, tuple):
            parts = [self.assign(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value if value is None else self._semantic.to_tensor(self._unwrapped(value), False)

    def both(self, *operands: Callable[[], Any]) -> Any:
        """``a and b``."""
        return self._logical(operands, False)

    def either(self, *operands: Callable[[], Any]) -> Any:
        """``a or b``."""
        return self._logical(operands, True)

    def _logical(self, operands: tuple[Callable[[], Any], ...], decisive: bool) -> Any:
        """Compile-time operands decide at once; tensors are all evaluated and combined bit by bit."""
        result = value = None
        for operand in operands:
            value = self._unwrapped(operand())
            if not isinstance(value, self._tl.tensor):
                if bool(value) is decisive:
                    return value
                continue
            mask = value if value.dtype.is_int1() else self._semantic.not_equal(value, self._semantic.to_tensor(0))
            if result is None:
                result = mask
            else:
                result = self._semantic.or_(result, mask) if decisive else self._semantic.and_(result, mask)
        return value if result is None else result

    def negate(self, value: Any) -> Any:
        """``not a``."""
        value = self._unwrapped(value)
        if not isinstance(value, self._tl.tensor):
            return not value
        return self._semantic.equal(value, self._semantic.to_tensor(0))

    def chain(self, evaluate: Callable[[], Any]) -> Any:
        """``a < b < c``, which compilers up to 3.7 reject."""
        if self.chained_comparisons:
            return evaluate()
        raise NotImplementedError(
            "this Triton's compiler refuses a chained comparison (a < b < c) inside a kernel; write (a < b) & (b < c)"
        )

    def extreme(self, function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        """``min`` or ``max`` called by its bare name: ``tl.minimum`` or ``tl.maximum`` if a tensor is among them."""
        of_tensors = {builtins.min: self._tl.core.builtin_min, builtins.max: self._tl.core.builtin_max}.get(function)
        values = [self._unwrapped(v) for v in operands]
        if of_tensors is None or not any(isinstance(v, self._tl.tensor) for v in values):
            return function(*operands, **options)
        with warnings.catch_warnings():
            # The compiler, not the interpreter, warns that blocks should use maximum().
            warnings.simplefilter("ignore")
            return of_tensors(*values, **options)

    def branch(self, test: Any, frame: Frame | None = None) -> Branch:
        """``if test``: the paths that the active programs take; ``frame`` is the call that may return inside."""
        truth = self._truth(test)
        if frame is not None and isinstance(test, self._tl.tensor):
            frame.decided = True
        if isinstance(truth, bool):
            if batch.current.empty():
                return NEITHER
            return TAKEN if truth else NOT_TAKEN
        return Branch(True, True, self._merger, truth)

    def choose(self, test: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """``first if test else second``."""
        branch = self.branch(test)
        if not branch.divergent:
            value = second() if branch.second else first()
            # Compiled, the result of a tensor's condition is a tensor: a number's `//` and `%` would round down.
            decided = isinstance(self._unwrapped(test), self._tl.tensor)
            return self._semantic.to_tensor(value, False) if decided else value
        branch.enter(())
        branch.switch((self._semantic.to_tensor(first(), False),))
        return branch.join((self._semantic.to_tensor(second(), False),))[0]

    def check(self, test: Any, message: Callable[[], Any]) -> None:
        """``assert test, message``."""
        test = self._unwrapped(test)
        if isinstance(test, self._tl.tensor):
            data = test.handle.data
            held = bool(batch.current.of_active(data != data.dtype.type(0)).all())
        else:
            held = bool(test)
        if not held:
            raise AssertionError(self._unwrapped(message()))

    def frame(self) -> Frame:
        """The call of a function that returns from inside a branch."""
        return Frame(self._merger, self.assign)

    def loop(self) -> Loop:
        """A ``for`` or ``while`` at its beginning."""
        return Loop(self._merger)

    def together(self, what: str) -> None:
        """``break`` or ``continue`` of a loop over compile-time values, which all programs must reach together."""
        if batch.current.active is not None:
            raise NotBatchedError(f"{what} in a branch that only some programs take")

    def test(self, loop: Loop, condition: Any, where: str) -> bool:
        """The condition of a ``while``."""
        wrapper: Any = getattr(self._tl, "condition", ())
        condition = condition.condition if isinstance(condition, wrapper) else condition
        return loop.test(self._truth(condition), where)

    def iterate(self, loop: Loop, *bounds: Any, **options: Any) -> Iterator[Any]:
        """``range`` or ``tl.range`` of a ``for`` loop: yields scalar tensors of the bounds' common integer type."""
        options.pop("_semantic", None)
        if bounds and "step" in options:
            bounds = (*(bounds if len(bounds) > 1 else (0, *bounds)), options["step"])
        values = [self._unwrapped(b) for b in bounds]
        wide = any(isinstance(b, self._tl.tensor) and b.dtype.primitive_bitwidth == 64 for b in values)
        numbers = [self._number(b) for b in values]
        start = numbers[0] if len(numbers) > 1 else np.zeros(1, np.int64)
        stop = numbers[1] if len(numbers) > 1 else numbers[0]
        step = numbers[2] if len(numbers) > 2 else np.ones(1, np.int64)
        if (batch.current.of_active(step) == 0).any():
            raise ValueError("range() arg 3 must not be zero")
        wide = wide or any(bool(((n < -(2**31)) | (n >= 2**31)).any()) for n in numbers)
        safe = np.where(step == 0, 1, step)
        trips = np.maximum(-((start - stop) // safe), 0)
        dtype, kind = (np.int64, self._tl.int64) if wide else (np.int32, self._tl.int32)
        for index in loop.counted(start, trips, step):
            yield self._tl.tensor(self._handle(index.astype(dtype), kind), kind)

    def plain_iterate(self, *bounds: Any, **options: Any) -> Iterator[Any]:
        """``tl.range`` outside of a rewritten ``for``."""
        return self.iterate(self.loop(), *bounds, **options)

    def _number(self, bound: Any) -> Array:
        if isinstance(bound, self._tl.tensor):
            return np.asarray(bound.handle.data.reshape(-1).astype(np.int64))
        return np.array([int(bound)], np.int64)

    def _truth(self, value: Any) -> bool | Array:
        """A bool, or bool (programs,) where active programs disagree."""
        value = self._unwrapped(value)
        if not isinstance(value, self._tl.tensor):
            return bool(value)
        data = value.handle.data
        if data.size != data.shape[0]:
            raise ValueError(
                f"the condition of an `if` or `while` must be a scalar, this one has shape {tuple(value.shape)}; "
                "combine the elements first, with tl.max or tl.min"
            )
        scalar = data.reshape(-1)
        scalar = scalar if scalar.dtype == np.bool_ else scalar != scalar.dtype.type(0)
        mine = batch.current.of_active(scalar)
        if mine.size <= 1 or bool((mine == mine[0]).all()):
            return bool(mine[0]) if mine.size else False
        return np.asarray(scalar)

    def _unwrapped(self, value: Any) -> Any:
        return value.value if isinstance(value, self._tl.constexpr) else value
