"""Autotuned kernels, compiled or interpreted: which were launched, a launch with one config, a call that tunes.

Of Triton's ``Autotuner`` this touches ``run``, ``_bench``, ``prune_configs``, ``configs``, ``cache``,
``cache_results``, ``nargs``, ``arg_names``, ``base_fn``, ``fn.run``, ``pre_hook`` and ``post_hook``, and of ``Config``
``all_kwargs``, ``kwargs`` and ``pre_hook``: the same in 3.6.0, 3.7.1 and 3.9.0.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_fusion.errors import NotModelledError
from pytest_fusion.interpreter.scoped import replaced

# Triton's own tuner passes over what raises these, as over a `static_assert` that fails.
_NO_ROOM = frozenset({"OutOfResources", "PTXASError"})
_REFUSED = "CompileTimeAssertionFailure"
_TUNER = ("triton.runtime.autotuner", "Autotuner")
_INTERPRETER = ("triton", "runtime", "interpreter.py")
# A launch constant of a config below this is a flag or a number of stages, above it no tile that Triton would take.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 1 << 16
# A benchmark runs every config many times. Two runs show what it leaves behind, the third that it was not parity.
_MOST_TRIED = 3

Run = Callable[..., Any]


@dataclass(slots=True)
class Tuned:
    """An autotuned kernel with at least two configs, as the launches of one case saw it.

    ``survivors`` are the numbers of the configs that its own pruning left in any launch; ``tuning`` says that a launch
    had to choose one because none was chosen for its key before.
    """

    tuner: Any
    survivors: set[int] = field(default_factory=set)
    tuning: bool = False

    @property
    def kernel(self) -> str:
        return str(self.tuner.base_fn.__name__)

    @property
    def total(self) -> int:
        return len(self.tuner.configs)

    def config(self, index: int) -> dict[str, Any]:
        """What config number ``index`` passes to the kernel and the compiler, in JSON types."""
        given = self.tuner.configs[index].all_kwargs()
        return {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in given.items()}

    def blocks(self, index: int) -> dict[str, int]:
        """What config number ``index`` passes to the kernel that may be the size of a block, by its name."""
        given = self.tuner.configs[index].kwargs
        return {name: v for name, v in given.items() if type(v) is int and _SMALLEST_BLOCK <= v <= _LARGEST_BLOCK}

    def called(self, index: int) -> str:
        """A config as ``config 2 (BLOCK=128, num_warps=8) of matmul_kernel``; a cluster of one block is left out."""
        config = {name: v for name, v in self.config(index).items() if (name, v) != ("num_ctas", 1)}
        return f"config {index} ({', '.join(f'{name}={v}' for name, v in config.items())}) of {self.kernel}"


def unable(error: BaseException) -> bool:
    """Whether the device has no room for a config, or the CPU lane no model of what it does."""
    return any(type(cause).__name__ in _NO_ROOM or isinstance(cause, NotModelledError) for cause in causes(error))


def refused(error: BaseException) -> bool:
    """Whether a ``static_assert`` of the kernel refuses a config; interpreted ones are plain assertions of Triton's."""
    return any(
        type(cause).__name__ == _REFUSED or (type(cause) is AssertionError and _raised_in(cause) == _INTERPRETER)
        for cause in causes(error)
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was explicitly raised from, outermost first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _raised_in(error: BaseException) -> tuple[str, ...]:
    """The end of the path of the file that raised."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return Path(frames[-1][0].f_code.co_filename).parts[-3:] if frames else ()


@contextmanager
def noted(into: dict[int, Tuned]) -> Iterator[None]:
    """Note every autotuned kernel that is launched; does nothing where Triton was not imported yet."""

    def run(upstream: Run, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(tuner.configs) < 2:
            return upstream(tuner, *args, **kwargs)
        seen = into.setdefault(id(tuner), Tuned(tuner))
        seen.survivors |= _survivors(tuner, args, kwargs)
        known = len(tuner.cache)
        try:
            return upstream(tuner, *args, **kwargs)
        finally:
            seen.tuning |= len(tuner.cache) > known

    with replaced(*_TUNER, "run", run):
        yield


@dataclass(slots=True)
class Applied:
    """How many launches a forced config took, and what the last of them raised."""

    launches: int = 0
    error: Exception | None = None


@contextmanager
def forced(tuner: Any, index: int) -> Iterator[Applied]:
    """Launch a kernel with its config number ``index``, as if an earlier call had chosen it.

    A launch for whose arguments the kernel's pruning drops that config goes its own way. No ``reset_to_zero`` or
    ``restore_value`` happens, since Triton does neither once it has chosen; a config's own ``pre_hook`` is called.
    """
    applied = Applied()

    def run(upstream: Run, other: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if other is not tuner or index not in _survivors(tuner, args, kwargs):
            return upstream(other, *args, **kwargs)
        applied.launches += 1
        with _unchanged(tuner):
            tuner.configs = [tuner.configs[index]]
            try:
                return upstream(tuner, *args, **kwargs)
            except Exception as error:
                applied.error = error
                raise

    with replaced(*_TUNER, "run", run):
        yield applied


class _Retuned(dict[Any, Any]):
    """An empty cache that chooses the config that another cache holds."""

    def __init__(self, known: Mapping[Any, Any]) -> None:
        super().__init__()
        self._known = known

    def __setitem__(self, key: Any, config: Any) -> None:
        super().__setitem__(key, self._known.get(key, config))


@contextmanager
def retuned(tuners: Iterable[Any]) -> Iterator[None]:
    """The first launch for each key tunes: configs really run, between the kernel's hooks, and nothing is timed.

    At most three configs are tried. The one chosen is that of the cache, which is as it was afterwards.
    """
    caches = {id(tuner): _Retuned(tuner.cache) for tuner in tuners}
    tried: dict[int, int] = {}

    def run(upstream: Run, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(tuner) not in caches:
            return upstream(tuner, *args, **kwargs)
        tried[id(tuner)] = 0
        with _unchanged(tuner):
            tuner.cache, tuner.cache_results = caches[id(tuner)], False
            return upstream(tuner, *args, **kwargs)

    def bench(upstream: Run, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(tuner) not in caches:
            return upstream(tuner, *args, **kwargs)
        tried[id(tuner)] += 1
        ran = tried[id(tuner)] <= _MOST_TRIED and _try(tuner, args, **kwargs)
        return [0.0 if ran else float("inf")] * 3

    with replaced(*_TUNER, "run", run), replaced(*_TUNER, "_bench", bench):
        yield


def _try(tuner: Any, args: tuple[Any, ...], *, config: Any, **meta: Any) -> bool:
    """One run of a benchmark; false where the config cannot run."""
    current = {**meta, **config.all_kwargs()}
    try:
        _run_between_hooks(tuner, args, config, current)
    except Exception as error:
        if unable(error) or refused(error):
            return False
        raise
    return True


def _run_between_hooks(tuner: Any, args: tuple[Any, ...], config: Any, current: dict[str, Any]) -> None:
    values = {**tuner.nargs, **current}
    if config.pre_hook is not None:
        config.pre_hook(values)
    tuner.pre_hook(values)
    try:
        tuner.fn.run(*args, **current)
    except Exception as error:
        tuner.post_hook(values, exception=error)
        raise
    tuner.post_hook(values, exception=None)


def pruned(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The configs that the kernel's pruning leaves for these arguments, in its order.

    Triton prunes only when it tunes, so pruning that fails elsewhere is nobody's error: nothing could be chosen.
    """
    with _unchanged(tuner):
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        try:
            return list(tuner.prune_configs(kwargs))
        except Exception:  # noqa: BLE001
            return []


def _survivors(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    """The numbers of the configs that the pruning leaves."""
    left = set(pruned(tuner, args, kwargs))
    return {index for index, config in enumerate(tuner.configs) if config in left}


@contextmanager
def _unchanged(tuner: Any) -> Iterator[None]:
    """Put every attribute back: a launch notes its choice, its arguments and its timings."""
    before = dict(vars(tuner))
    try:
        yield
    finally:
        vars(tuner).clear()
        vars(tuner).update(before)
