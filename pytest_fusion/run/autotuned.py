"""Launches autotuned kernels, compiled or interpreted, with the configs of a case, without a benchmark.

On a GPU a benchmark of a dozen configs takes minutes for each new key, and its choice is chance. Here every key is in
the tuner's cache with the config of the case, so a launcher that reads ``best_config`` or the cache reads that config.

Touches ``run``, ``_bench``, ``prune_configs``, ``configs``, ``cache``, ``cache_results``, ``best_config``, ``nargs``,
``arg_names``, ``base_fn``, ``fn.run``, ``pre_hook`` and ``post_hook`` of Triton's ``Autotuner``, and ``all_kwargs``,
``kwargs`` and ``pre_hook`` of ``Config``: the same in 3.6.0, 3.7.1 and 3.9.0.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_fusion.case.case_model import Config
from pytest_fusion.errors import NotModelledError
from pytest_fusion.interpreter.scoped import listed, replaced
from pytest_fusion.spec.wording import brief

# Triton's tuner skips a config that raises one of these or fails a `static_assert`.
_NO_ROOM = frozenset({"OutOfResources", "PTXASError"})
_REFUSED = "CompileTimeAssertionFailure"
_TUNER = ("triton.runtime.autotuner", "Autotuner")
_INTERPRETER = ("triton", "runtime", "interpreter.py")
# A smaller constant of a config is a flag or a number of stages; Triton takes no larger tile.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 1 << 16
# Two runs of a config show what a run leaves behind; a third excludes an effect that cancels in pairs.
TRIED = 3

Run = Callable[..., Any]


@dataclass(slots=True)
class Tuned:
    """An autotuned kernel with at least two configs, as launched in one case; configs are numbers. ``survivors`` passed
    its pruning, ``launched`` ran, ``unable`` could not, with the reason, and a ``static_assert`` rejects ``refused``.
    ``keys`` has the survivors of each key."""

    tuner: Any
    survivors: set[int] = field(default_factory=set)
    launched: set[int] = field(default_factory=set)
    unable: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    keys: dict[Any, frozenset[int]] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        return str(self.tuner.base_fn.__name__)

    @property
    def total(self) -> int:
        return len(self.tuner.configs)

    def config(self, index: int) -> dict[str, Any]:
        """The arguments of the kernel and the compiler from config number ``index``, in JSON types."""
        given = self.tuner.configs[index].all_kwargs()
        return {name: v if isinstance(v, bool | int | float | str) else str(v) for name, v in given.items()}

    def read(self, index: int) -> tuple[str, Any]:
        """The kernel's own arguments and the hook from config number ``index``: not warps, unless it takes them."""
        config = self.tuner.configs[index]
        own = {name: value for name, value in config.all_kwargs().items() if name in self.tuner.arg_names}
        return repr(own), config.pre_hook

    def blocks(self, index: int) -> dict[str, int]:
        """The kernel arguments of config number ``index`` that may be block sizes, by name."""
        given = self.tuner.configs[index].kwargs
        return {name: v for name, v in given.items() if type(v) is int and _SMALLEST_BLOCK <= v <= _LARGEST_BLOCK}

    def called(self, index: int) -> str:
        """A config as ``config 2 (BLOCK=128, num_warps=8) of matmul_kernel``; omits a cluster of one block."""
        config = {name: v for name, v in self.config(index).items() if (name, v) != ("num_ctas", 1)}
        return f"config {index} ({', '.join(f'{name}={v}' for name, v in config.items())}) of {self.kernel}"


def unable(error: BaseException) -> bool:
    """Whether the device has no room for a config, or the CPU lane does not model it."""
    return any(type(cause).__name__ in _NO_ROOM or isinstance(cause, NotModelledError) for cause in causes(error))


def refused(error: BaseException) -> bool:
    """Whether a ``static_assert`` of the kernel rejects a config; interpreted ones are plain assertions of Triton's."""
    return any(
        type(cause).__name__ == _REFUSED or (type(cause) is AssertionError and _raised_in(cause) == _INTERPRETER)
        for cause in causes(error)
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its explicit causes, outermost first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _raised_in(error: BaseException) -> tuple[str, ...]:
    """The last three parts of the path of the file that raised."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return Path(frames[-1][0].f_code.co_filename).parts[-3:] if frames else ()


class _Chosen(dict[Any, Any]):
    """A tuner's cache with ``config`` for every key; ``key`` is the last one."""

    config: Any = None
    key: Any = None

    def __contains__(self, key: object) -> bool:
        self.key = key
        self[key] = self.config
        return True


@dataclass(slots=True)
class _Launching:
    """Launches the kernels of one case with ``configs`` and records them in ``seen``, by the tuner's identity."""

    configs: Mapping[str, Config]
    seen: dict[int, Tuned]
    # Restores the tuners at its end.
    stack: contextlib.ExitStack
    own: set[int] = field(default_factory=set)
    tried: int = 0

    def tuned(self, tuner: Any) -> Tuned:
        """The record of a kernel. From its first launch to the end of the case, the tuner has a cache of its own."""
        if id(tuner) not in self.own:
            self.own.add(id(tuner))
            self.stack.enter_context(_restored(tuner))
            self.seen.setdefault(id(tuner), Tuned(tuner))
            tuning = self.configs.get(str(tuner.base_fn.__name__), Config()).launch == "tuning"
            tuner.cache, tuner.cache_results = {} if tuning else _Chosen(), False
        return self.seen[id(tuner)]


_ACTIVE: list[_Launching] = []


@contextmanager
def launched(configs: Mapping[str, Config], seen: dict[int, Tuned]) -> Iterator[None]:
    """Launch every autotuned kernel with its config and record it; does nothing before Triton is imported. As in
    Triton's tuner, the next config replaces one that cannot run (`unable`, `refused`). Only a launch that tunes does
    ``reset_to_zero`` and ``restore_value``."""
    with contextlib.ExitStack() as stack, listed(_ACTIVE, _Launching(configs, seen, stack)):
        if len(_ACTIVE) == 1:
            stack.enter_context(replaced(*_TUNER, "run", _run))
            stack.enter_context(replaced(*_TUNER, "_bench", _bench))
        yield


def _run(upstream: Run, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(tuner.configs) < 2:
        return upstream(tuner, *args, **kwargs)
    launching = _ACTIVE[-1]
    seen, launching.tried = launching.tuned(tuner), 0
    left = _pruned(tuner, args, kwargs)
    survivors = frozenset(index for index, config in enumerate(tuner.configs) if config in left)
    seen.survivors |= survivors
    cache = tuner.cache
    if not left or not isinstance(cache, _Chosen):
        try:
            return upstream(tuner, *args, **kwargs)  # tunes, or its pruning raises
        finally:
            seen.launched |= {index for index in survivors if tuner.configs[index] is vars(tuner).get("best_config")}
    order = _in_turn(tuner, left, launching.configs.get(seen.kernel, Config()))
    for config in order:
        cache.config = config
        number = {tuner.configs.index(config)} if config in tuner.configs else set()
        try:
            result = upstream(tuner, *args, **kwargs)
        except Exception as error:
            seen.refused |= number if refused(error) else set()
            seen.unable |= dict.fromkeys(number, brief(error)) if unable(error) else {}
            if config is order[-1] or not (refused(error) or unable(error)):
                seen.launched |= number
                raise
            continue
        seen.launched |= number
        seen.keys[cache.key] = seen.keys.get(cache.key, frozenset()) | survivors
        return result
    raise AssertionError("the last config returns or raises")


def _in_turn(tuner: Any, left: list[Any], wanted: Config) -> list[Any]:
    """The wanted config, or another one that pruning leaves; then those that replace it where it cannot run."""
    number = wanted.number
    own = tuner.configs[number] if number < len(tuner.configs) else None
    if wanted.launch == "stale" and own is not None:
        return [own]
    start = left.index(own) if own in left else number % len(left)
    return [*left[start:], *left[:start]]


def _bench(upstream: Run, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001 - as `replaced` calls it
    """Replaces a benchmark: runs a config between the kernel's hooks, at most ``TRIED`` times for one key.

    The case's config says which of these wins: what one leaves behind may be wrong for another alone.
    """
    launching = _ACTIVE[-1]
    wanted = launching.configs.get(str(tuner.base_fn.__name__), Config())
    ran = launching.tried < TRIED and _try(tuner, args, **kwargs)
    wins = launching.tried == wanted.number % TRIED
    launching.tried += 1
    return [(0.0 if wins else 1.0) if ran else float("inf")] * 3


def _try(tuner: Any, args: tuple[Any, ...], *, config: Any, **meta: Any) -> bool:
    """Run a config once; false if it cannot run."""
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
    """The configs that the kernel's pruning leaves for these arguments, in its order; does not change the tuner."""
    with _restored(tuner):
        return _pruned(tuner, args, kwargs)


@contextmanager
def _restored(tuner: Any) -> Iterator[None]:
    """Restore all attributes of the tuner afterwards."""
    before = dict(vars(tuner))
    try:
        yield
    finally:
        vars(tuner).clear()
        vars(tuner).update(before)


def _pruned(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The configs that pruning leaves; empty if it raises, since Triton prunes only when it tunes."""
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        return list(tuner.prune_configs(kwargs))
    except Exception:  # noqa: BLE001 - the kernel's own error, which its launch raises where it tunes
        return []
