"""Records launches of Triton kernels as `Specialisation`s: interpreted, compiled, or left out.

Touches ``InterpretedFunction.run``, ``JITFunction.run``, ``Autotuner.run`` and the names listed in `run/autotuned`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pytest_fusion.interpreter.scoped import replaced
from pytest_fusion.run.autotuned import pruned
from pytest_fusion.run.measure.resources.specialisation import Specialisation
from pytest_fusion.run.measure.resources.specialiser import Live, NotSpecialisedError, bind, specialise


@dataclass(frozen=True, slots=True)
class Noted:
    """One launch; ``specialisation`` is ``None`` for the ``reason`` that it cannot be described. ``others``: those of
    the other configs that an autotuner can choose, as it skips one that does not fit. The kernels in ``live`` and
    ``live_others`` stay in this process."""

    kernel: str
    specialisation: Specialisation | None
    reason: str = ""
    others: tuple[Specialisation, ...] = ()
    live: Live | None = None
    live_others: tuple[Live, ...] = ()


class _Notes:
    def __init__(self, into: list[Noted], run: bool, then: Callable[[Any, Noted], None] | None) -> None:
        self._into = into
        self._run = run
        self._then = then
        # While an autotuner runs: whether its configs are being described, and those found.
        self._tuning = self._asking = False
        self._found: list[tuple[Specialisation, Live]] = []

    def launched(self, upstream: Any, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces a kernel's ``run``."""
        plain = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        if kwargs.get("warmup") and not self._asking:
            return upstream(kernel, *args, **kwargs)
        name = str(kernel.fn.__name__)
        try:
            live = bind(kernel, args, plain)
            found = specialise(live)
        except NotSpecialisedError as error:
            noted = Noted(name, None, str(error))
        else:
            if self._asking:
                self._found.append((found, live))
            others = [other for other in self._found if other[0] != found]
            noted = Noted(name, found, "", tuple(o for o, _ in others), live, tuple(o for _, o in others))
        if self._asking:
            return None
        self._into.append(noted)
        result = upstream(kernel, *args, **kwargs) if self._run else None
        if self._then is not None:
            self._then(result, noted)
        return result

    def tuned(self, upstream: Any, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces an autotuner's ``run``: first describes every config that its pruning leaves."""
        if len(tuner.configs) < 2 or self._tuning or not hasattr(tuner.fn, "run"):
            return upstream(tuner, *args, **kwargs)
        self._tuning = self._asking = True
        try:
            for config in pruned(tuner, args, kwargs):
                # A config's hook sets the blocks of tensor descriptors, so it runs first; the launch calls its own
                # hook.
                with contextlib.suppress(Exception):
                    _launch(tuner, config, args, kwargs)
            self._asking = False
            return upstream(tuner, *args, **kwargs)
        finally:
            self._tuning = self._asking = False
            self._found.clear()


def _launch(tuner: Any, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = {**kwargs, **config.all_kwargs()}
    if config.pre_hook is not None:
        names = dict(zip(tuner.arg_names, args, strict=False))
        config.pre_hook({**names, **{n: v for n, v in given.items() if n not in ("grid", "warmup")}})
    tuner.fn.run(*args, **{**given, "warmup": True})


@contextmanager
def noted(into: list[Noted], *, run: bool = True, then: Callable[[Any, Noted], None] | None = None) -> Iterator[None]:
    """Note every launch; does nothing where Triton was not imported. ``run=False`` leaves the kernels out: nothing is
    written. ``then`` is called after each launch with what it returned, a compiled kernel on a GPU."""
    notes = _Notes(into, run, then)
    with contextlib.ExitStack() as stack:
        for module, class_, replacement in (
            ("triton.runtime.interpreter", "InterpretedFunction", notes.launched),
            ("triton.runtime.jit", "JITFunction", notes.launched),
            ("triton.runtime.autotuner", "Autotuner", notes.tuned),
        ):
            stack.enter_context(replaced(module, class_, "run", replacement))
        yield
