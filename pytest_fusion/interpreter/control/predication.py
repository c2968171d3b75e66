"""Branches, loops and returns of programs that take different paths, by predication (docs/internals/interpreter.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import numpy as np

from pytest_fusion.interpreter.bridge.numpy_dtypes import Array
from pytest_fusion.interpreter.control import batch
from pytest_fusion.interpreter.control.batch import EndlessLoopError, NotBatchedError, WaitsForAnotherError, aligned
from pytest_fusion.interpreter.memory import access
from pytest_fusion.interpreter.memory.regions import joined

# After so many iterations that change neither memory nor variables a loop counts as endless.
_ROUNDS_WITHOUT_CHANGE = 3
# Iterations after which a loop counts as waiting for other programs, if none leaves it while others wait behind it. A
# counting loop changes in each iteration. If it does not wait, running the programs alone gives the same result.
_TURNS_WHILE_OTHERS_WAIT = 2_000
# A turn takes 0.1 ms and more: so many take minutes. Bytes that no tensor owns are some 2^31 where they are read as a
# length, which in tiles of 2048 is still more.
_MOST_TURNS = 1_000_000


class _Missing:
    """The value of a variable that this path has not assigned."""

    def __repr__(self) -> str:
        return "<not assigned on this path>"

    def __getattr__(self, name: str) -> Any:
        raise NameError("a variable is used that was assigned only on a path that was not taken")


MISSING: Any = _Missing()


class _Unlike:
    """A variable with different types or shapes in different programs. Compilers drop it; a use ends the batch."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __repr__(self) -> str:
        return f"<{self._reason}>"

    def _use(self, *_: Any) -> Any:
        raise NotBatchedError(self._reason)

    __getattr__ = __bool__ = __eq__ = __ne__ = __index__ = __iter__ = __getitem__ = _use


Variables = tuple[Any, ...]


def _both(a: Array | None, b: Array) -> Array:
    return b if a is None else a & b


class Merger:
    """Merges the values that a variable has in different programs. Built once per process."""

    def __init__(self, tl: Any, handle: Any, semantic: Any) -> None:
        self._tl = tl
        self._handle = handle
        self._semantic = semantic

    def merge(self, chosen: Array, new: Variables, old: Variables) -> Variables:
        """``new`` in the programs ``chosen`` (bool, (programs,)), ``old`` in the others; variable by variable."""
        return tuple(self.one(chosen, n, o) for n, o in zip(new, old, strict=True))

    def one(self, chosen: Array, new: Any, old: Any) -> Any:
        """One variable of :meth:`merge`."""
        if new is old or old is MISSING:
            return new
        if new is MISSING:
            return old
        for value in (new, old):
            if type(value) is _Unlike:
                return value
        if isinstance(new, self._tl.tensor) and isinstance(old, self._tl.tensor):
            return self._tensors(chosen, new, old)
        if isinstance(new, tuple | list | self._tl.tuple) and isinstance(old, type(new)) and len(new) == len(old):
            merged = [self.one(chosen, n, o) for n, o in zip(new, old, strict=True)]
            return type(new)(*merged) if hasattr(new, "_fields") else type(new)(merged)
        if hasattr(new, "block_type") and hasattr(old, "block_type") and new.handle.alike(old.handle):
            return self._descriptors(chosen, new, old)
        plain = getattr(new, "value", new), getattr(old, "value", old)
        if type(plain[0]) is type(plain[1]) and not hasattr(new, "handle") and plain[0] == plain[1]:
            return new
        if all(isinstance(value, int | float | self._tl.tensor) for value in plain):
            tensors = [self._semantic.to_tensor(value) for value in plain]
            return self._tensors(chosen, *tensors)
        return _Unlike(f"a variable is a {type(new).__name__} in some programs, something else in others")

    def _descriptors(self, chosen: Array, new: Any, old: Any) -> Any:
        merged = copy(new)
        merged.handle = new.handle.merged(chosen, old.handle)
        for name in ("shape", "strides"):
            if hasattr(new, name):
                setattr(merged, name, self.one(chosen, getattr(new, name), getattr(old, name)))
        return merged

    def _tensors(self, chosen: Array, new: Any, old: Any) -> Any:
        mine, theirs = new.handle, old.handle
        if mine is theirs:
            return new
        blocks = [hasattr(handle, "merged") for handle in (mine, theirs)]
        if all(blocks) and mine.alike(theirs):
            return self._tl.tensor(mine.merged(chosen, theirs), new.type)
        if any(blocks) or tuple(new.shape) != tuple(old.shape) or new.dtype.name != old.dtype.name:
            return _Unlike(f"a variable is {new.type} in some programs and {old.type} in others")
        a, b = aligned(_unused(mine), _unused(theirs))
        which = chosen.reshape(-1, *(1,) * (a.ndim - 1))
        if a.dtype != b.dtype:
            b = b.astype(a.dtype)
        held = [*getattr(mine, "held", ()), *getattr(theirs, "held", ())]
        if held:
            suspect = type(mine if hasattr(mine, "held") else theirs)
            return self._tl.tensor(suspect(np.where(which, a, b), mine.dtype, held), new.type)
        origin = mine.attr if mine.attr == theirs.attr else joined(mine.attr, theirs.attr)
        return self._tl.tensor(self._handle(np.where(which, a, b), mine.dtype, origin), new.type)


def _unused(handle: Any) -> Array:
    """The array of a handle, without counting as a use of a loaded value."""
    array: Array = handle.values if hasattr(handle, "held") else handle.data
    return array


class Branch:
    """An ``if``; ``first`` and ``second``: whether any program takes that path."""

    __slots__ = ("_before", "_mask", "_merger", "_saved", "_then", "divergent", "first", "second")

    def __init__(self, first: bool, second: bool, merger: Merger | None = None, mask: Array | None = None) -> None:
        self.first, self.second = first, second
        self.divergent = mask is not None
        self._mask, self._merger = mask, merger
        self._before: Array | None = None
        self._saved: Variables = ()
        self._then: Variables = ()

    def enter(self, variables: Variables) -> None:
        """Begin the first path: programs that take the second become inactive."""
        assert self._mask is not None
        self._before, self._saved = batch.current.active, variables
        batch.current.active = _both(self._before, self._mask)

    def switch(self, variables: Variables) -> Variables:
        """Begin the second path: activate the other programs, and return the variables from before the branch."""
        assert self._mask is not None
        self._then = variables
        # Programs that returned on the first path stay inactive.
        self._before = _without(self._before, self._mask, batch.current.active)
        batch.current.active = _both(self._before, ~self._mask)
        return self._saved

    def join(self, variables: Variables) -> Variables:
        """End both paths: activate all programs, and return the merged variables."""
        assert self._mask is not None
        assert self._merger is not None
        self._before = _without(self._before, ~self._mask, batch.current.active)
        batch.current.active = self._before
        return self._merger.merge(self._mask, self._then, variables)


def _without(before: Array | None, went: Array, still: Array | None) -> Array | None:
    """``before`` less those of ``went`` that are no longer active."""
    assert still is not None
    gone = _both(before, went) & ~still
    return _both(before, ~gone) if gone.any() else before


TAKEN = Branch(True, False)
NOT_TAKEN = Branch(False, True)
NEITHER = Branch(False, False)


class Loop:
    """The iterations of a loop; ``partial``: whether some programs have left it already."""

    def __init__(self, merger: Merger) -> None:
        self.partial = False
        self._merger = merger
        self._entered = batch.current.active
        self._active = self._entered
        self._unchanged = 0
        self._turns = 0
        self._changes = -1
        self._reads = batch.current.reads
        self._before: Variables = ()

    def counted(self, start: Array, trips: Array, step: Array) -> Iterator[Array]:
        """The loop variable, (programs,) or (1,), while any active program has iterations left; int64 arrays.

        Raises ``EndlessLoopError`` for more of them than end in the time that a call may take.
        """
        mine = batch.current.of_active(trips)
        most = int(mine.max()) if mine.size else 0
        if most > _MOST_TURNS:
            raise EndlessLoopError(f"a loop never ends: its bounds give it {most:,} turns")
        least = int(mine.min()) if mine.size else 0
        for turn in range(most):
            if turn >= least:
                self._narrow(trips > turn)
            yield start + turn * step
            self._gone()
            if batch.current.empty():
                break

    def done(self) -> None:
        """End the loop: the programs that left it earlier become active again."""
        self._gone()
        batch.current.active = self._entered

    def test(self, condition: Array | bool, where: str) -> bool:
        """Whether any program continues a ``while``; the others become inactive."""
        self._gone()
        if isinstance(condition, bool):
            again = condition and not batch.current.empty()
        else:
            mine = batch.current.of_active(condition)
            again = bool(mine.any())
            if again and not bool(mine.all()):
                self._narrow(condition)
        if not again:
            return False
        stuck = self._turns >= _TURNS_WHILE_OTHERS_WAIT and batch.current.active is not None
        unchanged = self._unchanged >= _ROUNDS_WITHOUT_CHANGE
        if unchanged and (batch.current.reads == self._reads or access.launch().grid == (1, 1, 1)):
            raise EndlessLoopError(f"the loop at {where} never ends: nothing in it changes")
        if unchanged or (stuck and batch.current.count > 1):
            what = f"the loop at {where} waits for what only another program of the launch can do"
            if batch.current.count > 1:
                raise NotBatchedError(what)
            raise WaitsForAnotherError(
                f"{what}, and every program before it has ended: programs run one after the other here, so it would "
                "wait for ever. On a GPU it works only while all programs are resident at once; use two launches, or "
                "an atomic counter that lets the last program do the rest"
            )
        return True

    def turned(self, variables: Variables) -> None:
        """End an iteration of a ``while``; the loop assigns ``variables``."""
        self._turns += 1
        changes = batch.current.changes
        same = changes == self._changes and _equal(variables, self._before)
        self._unchanged = self._unchanged + 1 if same else 0
        self._changes, self._before = changes, variables

    def merge(self, old: Variables, new: Variables) -> Variables:
        """``new`` for the programs in this iteration, ``old`` for those that left before it."""
        assert self._active is not None
        return self._merger.merge(self._active, new, old)

    def agree(self, what: str) -> None:
        """Raise ``NotBatchedError`` unless all programs ``break`` or ``continue`` together."""
        if self.partial or batch.current.active is not self._active:
            raise NotBatchedError(f"{what} in a branch that only some programs take")

    def _narrow(self, condition: Array) -> None:
        mask = _both(self._active, np.broadcast_to(condition, (batch.current.count,)))
        self._active = batch.current.active = mask
        self.partial = True
        self._turns = 0

    def _gone(self) -> None:
        """Remove programs that returned inside the body from the loop."""
        now = batch.current.active
        if now is self._active or now is None:
            return
        gone = ~now if self._active is None else self._active & ~now
        if gone.any():
            self._active = now
            self._entered = ~gone if self._entered is None else self._entered & ~gone
            self.partial = True


def _equal(a: Variables, b: Variables) -> bool:
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if x is y:
            continue
        if x is MISSING or y is MISSING or _Unlike in (type(x), type(y)):
            return False
        left: Any = getattr(x, "handle", None)
        right: Any = getattr(y, "handle", None)
        if any(side is None or hasattr(side, "merged") for side in (left, right)):
            return False
        if not np.array_equal(_bits(_unused(left)), _bits(_unused(right))):
            return False
    return True


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)


class Frame:
    """A call with a ``return`` in a branch or loop; ``decided``: a tensor chose one, so ``made`` makes it a tensor."""

    def __init__(self, merger: Merger, made: Callable[[Any], Any]) -> None:
        self.decided = False
        self._merger, self._made = merger, made
        self._entered = batch.current.active
        self._returned: Array | None = None
        self._value: Any = MISSING

    def leave(self, value: Any) -> bool:
        """Return ``value`` from the active programs. True if none remain active."""
        now = batch.current.active
        value = self._made(value) if self.decided else value
        if self._returned is None:
            self._value, self._returned = value, now
            if now is None or self._all_returned():
                return True
        else:
            mine = np.ones(batch.current.count, np.bool_) if now is None else now
            self._value = self._merger.one(mine, value, self._value)
            self._returned = self._returned | mine
            if self._all_returned():
                return True
        batch.current.active = np.zeros(batch.current.count, np.bool_)
        return False

    def _all_returned(self) -> bool:
        assert self._returned is not None
        return bool((self._returned if self._entered is None else self._returned | ~self._entered).all())

    def finish(self, value: Any) -> Any:
        """End the function: its value, program by program. All programs that called it become active again."""
        if self._returned is not None and not batch.current.empty():
            self.leave(value)
        elif self._returned is None:
            self._value = self._made(value) if self.decided else value
        batch.current.active = self._entered
        return self._value

    def result(self) -> Any:
        """The returned value, after ``leave`` has returned true."""
        batch.current.active = self._entered
        return self._value
