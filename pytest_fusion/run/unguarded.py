"""Calls of a kernel without guards: a compiler, a capture or a stream sees only the kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pytest_fusion.case.containers import tensors_of
from pytest_fusion.interpreter.bridge.modelled_device import posing_as_cuda
from pytest_fusion.interpreter.bridge.named_device import with_stand_in
from pytest_fusion.interpreter.memory.memory_findings import Findings, into
from pytest_fusion.run.fused import ContextLost
from pytest_fusion.run.precision import default_precision
from pytest_fusion.run.process.fork import cuda_is_poisoned
from pytest_fusion.spec.wording import first_line


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """Run interpreted kernels without judging accesses; those that leave a storage silently do not happen."""
    # Not tracked: allocations are unknown here, so stores beside a view of its own buffer would be left out.
    with into(Findings(tracking=False)), posing_as_cuda(torch):
        yield


def called(
    fused: Callable[..., Any], arguments: Mapping[str, Any], extra: Mapping[str, Any]
) -> tuple[Any, Exception | None]:
    """One call's result, or its exception. Raises ``ContextLost`` if it destroyed the CUDA context."""
    device = next((t.device for t in tensors_of(arguments)), torch.device("cpu"))

    def once() -> Any:
        with bare(), default_precision():
            result = fused(**arguments, **extra)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return result

    try:
        return with_stand_in(once), None
    except Exception as error:
        if device.type == "cuda" and cuda_is_poisoned():
            raise ContextLost(first_line(error)) from error
        return None, error
