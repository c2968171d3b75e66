"""The processes that compile: without interpreter and GPU, forked from one that has imported torch and Triton."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pytest_fusion.run.measure.resources.compiler import compiled
from pytest_fusion.run.measure.resources.rehearsal import rehearse
from pytest_fusion.run.measure.resources.sent_call import NotSentError
from pytest_fusion.run.measure.resources.targets import TARGETS, Resources, Target
from pytest_fusion.run.process import compile_jobs

# Imports of every job: the stance of torch.compiler imports Dynamo, modules of tests the rest.
_IMPORTED = (
    *("torch", "torch._dynamo", "triton", "triton.compiler", "triton.backends.nvidia.compiler"),
    *("pytest", "hypothesis", "pytest_fusion.plugin.decorator"),
)


def prepare(target: Target) -> None:
    """Model a device of ``target`` in torch and Triton, before users' modules are imported."""
    import torch

    from pytest_fusion.interpreter.bridge import hook, modelled_device

    modelled_device.model(
        f"{target.device}, {target.name}",
        (target.major, target.minor),
        multiprocessors=target.multiprocessors,
        warps=target.warps,
        shared=target.shared,
        block=target.shared_per_block,
    )
    # torch's own compiled code is not measured, and generating it for an absent device would fail.
    torch.compiler.set_stance("force_eager")
    modelled_device.model_cuda(torch)
    modelled_device.model_driver(torch)
    hook.choose_without_timing(importlib.import_module("triton.runtime.autotuner").Autotuner)


def answer(
    job: dict[str, Any], target: Target, known: dict[str, Resources], begins: Callable[[str], None]
) -> dict[str, Any]:
    """The kernels that one call launches; ``known`` ones are compiled, ``begins`` is called with each other's name."""
    try:
        launches, problem, read = rehearse(job["call"])
    except NotSentError as error:
        return {"problem": str(error)}
    found: list[Resources] = []
    for noted in launches:
        key = noted.specialisation.key() if noted.specialisation is not None else noted.kernel
        if key not in known:
            begins(noted.kernel)
            known[key] = compiled(noted, target)
        if known[key] not in found:
            found.append(known[key])
    launched = [noted.specialisation.as_json() for noted in launches if noted.specialisation is not None]
    return {"resources": [one.as_json() for one in found], "launches": launched, "problem": problem, "read": read}


def work(request: Mapping[str, Any], progress: Callable[[dict[str, Any]], None]) -> None:
    """Run all jobs of a request, in order; ``progress`` is called before each kernel and after each job."""
    # The last output of an abort is the compiler's, not Python's stack.
    faulthandler.disable()
    sys.path[:] = request["path"]
    target = TARGETS[request["target"]]
    prepare(target)
    known: dict[str, Resources] = {}
    for job in request["jobs"]:
        number = job["id"]
        progress({"begins": number})

        def begins(kernel: str, number: int = number) -> None:
            progress({"begins": number, "kernel": kernel})

        progress({"id": number, "found": answer(job, target, known, begins)})


def main(requests: str, replies: str) -> None:
    """Do the slow imports, then fork a process for each batch of jobs."""
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    compile_jobs.serve(requests, replies, work)
