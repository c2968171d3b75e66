"""``@triton.autotune`` without a device to time on: chooses the first config that survives pruning, or a forced one.

Only the measurement is left out. Pruning, the key, the cache and the hooks stay Triton's own code: after choosing, the
tensors of ``reset_to_zero`` are cleared and those of ``restore_value`` untouched, as after a benchmark on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_tuned: dict[int, Any] = {}
_forced: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class TunedKernel:
    """An autotuned kernel that was launched: its name, where it is, and every config's meta-parameters."""

    kernel: str
    source: str
    configs: tuple[dict[str, Any], ...]
    chosen: int | None


def autotuned_kernels() -> tuple[TunedKernel, ...]:
    """The autotuned kernels with more than one config that were launched so far, in order of first launch."""
    return tuple(_described(tuner) for tuner in _tuned.values())


@contextmanager
def force_config(source: str, index: int) -> Iterator[None]:
    """Run the kernel defined at ``source`` (``TunedKernel.source``) with config number ``index``.

    A config that the kernel's own pruning removes for the given arguments is not run: the first survivor is.
    """
    _forced[source] = index
    try:
        yield
    finally:
        del _forced[source]


def patch(autotuner_class: Any) -> None:
    """Make Triton's ``Autotuner`` choose a config without measuring."""
    upstream_run = autotuner_class.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) < 2:
            return upstream_run(self, *args, **kwargs)
        _tuned.setdefault(id(self), self)
        if _source(self) not in _forced:
            return upstream_run(self, *args, **kwargs)
        # The cache would return the config chosen before, and store the forced one.
        cache, self.cache = self.cache, {}
        try:
            return upstream_run(self, *args, **kwargs)
        finally:
            self.cache = cache

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        conflicts = meta.keys() & config.kwargs.keys()
        if conflicts:
            raise ValueError(
                f"{', '.join(sorted(conflicts))} of kernel {self.base_fn.__name__} is set both by the launch and by an "
                "autotune config; leave it out of the launch"
            )
        wanted = _forced.get(_source(self))
        preferred = wanted is not None and self.configs[wanted] is config
        return [0.0 if preferred else 1.0] * 3

    autotuner_class.run = run
    autotuner_class._bench = bench


def _source(tuner: Any) -> str:
    code = tuner.base_fn.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _described(tuner: Any) -> TunedKernel:
    best = getattr(tuner, "best_config", None)
    chosen = next((i for i, config in enumerate(tuner.configs) if config is best), None)
    configs = tuple(dict(config.all_kwargs()) for config in tuner.configs)
    return TunedKernel(tuner.base_fn.__name__, _source(tuner), configs, chosen)
