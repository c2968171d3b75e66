"""The process that compiles: no interpreter, no GPU, jobs in as JSON on standard input, one line of JSON out for each.

Run as ``python -m pytest_fusion.run.process.compile_worker answer FD``, or forked by a process that is run as
``... serve SOCKET``; what modules print goes where it would, answers to ``FD``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pytest_fusion.run.measure.resources.compiler import compiled
from pytest_fusion.run.measure.resources.function_places import NotFoundError
from pytest_fusion.run.measure.resources.noting import Noted
from pytest_fusion.run.measure.resources.rehearsal import rehearse
from pytest_fusion.run.measure.resources.resource_record import Resources
from pytest_fusion.run.measure.resources.specialisation import Specialisation
from pytest_fusion.run.measure.resources.targets import TARGETS, Target
from pytest_fusion.run.process import forkserver

# By whoever compiles: the stance of torch.compiler imports Dynamo, and modules of tests import the rest.
_IMPORTED = (
    *("torch", "torch._dynamo", "triton", "triton.compiler", "triton.backends.nvidia.compiler"),
    *("pytest", "hypothesis", "pytest_fusion.plugin.decorator"),
)


def prepare(target: Target) -> None:
    """Model a device of ``target`` for whatever asks, before users' modules are imported."""
    import torch

    from pytest_fusion.interpreter.bridge import autotune, modelled_device

    modelled_device.model(
        f"{target.device}, {target.name}",
        (target.major, target.minor),
        multiprocessors=target.multiprocessors,
        warps=target.warps,
        shared=target.shared,
        block=target.shared_per_block,
    )
    # What is compiled by torch is not ours to measure, and generating code for a device that is not there would fail.
    torch.compiler.set_stance("force_eager")
    modelled_device.model_cuda(torch)
    modelled_device.model_driver(torch)
    # Nothing can be timed: the first config that survives pruning is chosen.
    autotune.patch(importlib.import_module("triton.runtime.autotuner").Autotuner)


def answer(
    job: dict[str, Any], target: Target, known: dict[str, Resources], begins: Callable[[str], None]
) -> dict[str, Any]:
    """What one job found: a launch described elsewhere, or a whole call.

    ``known`` is what was compiled before, ``begins`` is called with each kernel's name.
    """
    if "call" not in job:
        specialisation = Specialisation.from_json(job["specialisation"])
        others = tuple(Specialisation.from_json(other) for other in job["others"])
        begins(specialisation.kernel)
        return {"resources": [compiled(Noted(specialisation.kernel, specialisation, "", others), target).as_json()]}
    try:
        launches, problem, read = rehearse(job["call"])
    except NotFoundError as error:
        return {"problem": str(error)}
    found: list[Resources] = []
    for noted in launches:
        key = noted.specialisation.key() if noted.specialisation is not None else noted.kernel
        if key not in known:
            begins(noted.kernel)
            known[key] = compiled(noted, target)
        if known[key] not in found:
            found.append(known[key])
    told = [noted.specialisation.as_json() for noted in launches if noted.specialisation is not None]
    return {"resources": [one.as_json() for one in found], "launches": told, "problem": problem, "read": read}


def work(request: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """All jobs of a request, one after the other: ``begins`` is said before each, what it found after."""
    sys.path[:] = request["path"]
    target = TARGETS[request["target"]]
    prepare(target)
    known: dict[str, Resources] = {}
    for job in request["jobs"]:
        number = job["id"]
        say({"begins": number})

        def begins(kernel: str, number: int = number) -> None:
            say({"begins": number, "kernel": kernel})

        say({"id": number, **answer(job, target, known, begins)})


def answer_all(answers_to: int) -> None:
    """Read the request from standard input and answer it on this file descriptor."""
    request = json.load(sys.stdin)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    with os.fdopen(answers_to, "w", encoding="utf-8") as answers:

        def say(message: dict[str, Any]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        work(request, say)


def serve(connection: int) -> None:
    """Import what takes long, and fork a process for each request that comes by this socket."""
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    forkserver.serve(connection, answer_all)


def main(arguments: list[str]) -> None:
    what, number = arguments
    {"answer": answer_all, "serve": serve}[what](int(number))


if __name__ == "__main__":
    main(sys.argv[1:])
