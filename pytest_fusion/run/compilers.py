"""`torch.compile` in its normal use, its compilations and Triton's, and a CUDA graph of one call."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pytest_fusion.interpreter.scoped import replaced
from pytest_fusion.run import capture, pristine

# No sweep has more sizes; beyond torch's own limit of 8, fullgraph=True raises instead of recompiling.
_RECOMPILES, _MOST_RECOMPILES = 256, 4096
# The logger of torch's one message that it stops compiling a function; it works without an import.
_SAYS = "torch._dynamo.convert_frame"

_given_up: dict[str, int] = {}


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Start and end with an empty compiler, in this process: a child that has started CUDA must not fork workers."""
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        import torch._dynamo
        from torch._dynamo import config

        stack.enter_context(config.patch(recompile_limit=_RECOMPILES))
        if torch.cuda.is_available():
            import torch._inductor.config

            stack.enter_context(torch._inductor.config.patch(compile_threads=1))
        torch._dynamo.reset()
        try:
            yield
        finally:
            torch._dynamo.reset()


@contextlib.contextmanager
def announced(begins: Callable[[str], None], ends: Callable[[], None]) -> Iterator[None]:
    """Call ``begins`` with a name before torch.compile compiles what launchers have under it, ``ends`` afterwards.

    They have room for every case: at torch's limit of eight variants a function with ``fullgraph=True`` raises (rwkv7
    of fla-core), and no caller has so many shapes. Touches ``torch._dynamo.callback`` and ``config`` (2.11 and 2.13),
    where something has imported torch.compile.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._dynamo import config
    from torch._dynamo.callback import callback_handler as handler

    def begun(_: Any) -> None:
        begins("a function under torch.compile")

    def ended(_: Any) -> None:
        ends()

    handler.register_start_callback(begun)
    handler.register_end_callback(ended)
    try:
        with config.patch(recompile_limit=_RECOMPILES, accumulated_recompile_limit=_MOST_RECOMPILES):
            yield
    finally:
        for remove, callback in ((handler.remove_start_callback, begun), (handler.remove_end_callback, ended)):
            with contextlib.suppress(ValueError):  # torch._dynamo.reset() has removed it
                remove(callback)


class _Heard(logging.Handler):
    """Counts functions that reach torch.compile's limit of variants: they run uncompiled from then on."""

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        if "hit config." in str(record.msg) and len(arguments) > 2:
            limit, most, function = arguments[:3]
            reason = f"torch.compile stopped after {most} variants of {function} (torch._dynamo.config.{limit})"
            _given_up[reason] = _given_up.get(reason, 0) + 1


def given_up() -> dict[str, int]:
    """How often torch.compile stopped compiling a function, by reason, since the first call of `given_up`."""
    logger = logging.getLogger(_SAYS)
    if not any(isinstance(handler, _Heard) for handler in logger.handlers):
        logger.addHandler(_Heard())
    return dict(_given_up)


def compiled(fused: Callable[..., Any], backend: str, *, dynamic: bool | None) -> Callable[..., Any]:
    """The function under ``torch.compile(fullgraph=True)``."""

    def call(**arguments: Any) -> Any:
        return fused(**arguments)

    return torch.compile(call, fullgraph=True, dynamic=dynamic, backend=backend)


def refuses(error: BaseException) -> bool | None:
    """Whether torch.compile rejects the function as a whole graph; ``None`` for an internal error of torch."""
    from torch._dynamo import exc

    if isinstance(error, exc.InternalTorchDynamoError | exc.BackendCompilerFailed):
        return None
    return isinstance(error, exc.TorchDynamoException)


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextlib.contextmanager
def specialisations() -> Iterator[dict[int, Any]]:
    """The compiled kernels that the body launches, by identity. Touches ``JITFunction.run`` of Triton 3.6 to 3.9."""
    seen: dict[int, Any] = {}

    def run(upstream: Callable[..., Any], launched: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = upstream(launched, *args, **kwargs)
        if kernel is not None:
            seen[id(kernel)] = kernel
        return kernel

    with replaced("triton.runtime.jit", "JITFunction", "run", run):
        yield seen


class Captured:
    """A CUDA graph of one call on fixed memory, replayed on the current values. Raises what call or capture raises."""

    def __init__(self, fused: Callable[..., Any], arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        try:
            self._graph, self._result = capture.captured(lambda _: fused(**arguments, **extra), self._device)
        except capture.CaptureFailed as error:
            raise error.__cause__ or error from None

    def replay(self) -> Any:
        """The result, in the same memory each time."""
        self._graph.replay()
        pristine.synchronize(self._device)
        return self._result
