"""In a process under ncu: the measured calls once more, each after a marker. ncu numbers kernels and knows no calls:
the marker is a kernel of torch that nothing else launches, and a file has the order of calls and their results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.bench.entries import entries
from pytest_fusion.case.make import ImpossibleCase, InputFailed, make_inputs
from pytest_fusion.run.measure.launches.cupti import SENTINEL
from pytest_fusion.run.measure.timing.alone import alone
from pytest_fusion.run.pristine import synchronize
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief, first_line

# Names the file with the cases to call.
VARIABLE = "PYTEST_FUSION_PROFILED"
MARK = SENTINEL
BEGUN, DONE, RAISED = "begun", "done", "raised"
# The first call compiles and tunes; the second shows what the first has changed.
_WARM_UPS = 2
_CYCLES = 1000

Step = tuple[str, str, str]


def write_request(file: Path, cases: Sequence[str]) -> None:
    """Write the file that the process reads."""
    file.write_text(json.dumps(list(cases)), encoding="utf-8")


def steps(file: Path) -> list[Step]:
    """The notes of the process in order: what happened, the case, and a text."""
    noted = file.with_suffix(".steps")
    lines = noted.read_text(encoding="utf-8").splitlines() if noted.exists() else []
    return [(str(what), str(case), str(words)) for what, case, words in map(json.loads, lines)]


def all_entries(spec: FusionSpec, file: Path, device: torch.device, extra: Mapping[str, Any]) -> int:
    """Runs each entry of ``bench=`` that the file requests; returns their number."""
    named = entries(spec)
    for entry in named:
        try:
            logical = make_inputs(spec, entry.case, device)
        except (ImpossibleCase, InputFailed, RuntimeError, MemoryError) as error:
            _note(file, RAISED, entry.text, f"the inputs cannot be made: {first_line(error)}")
            continue
        one_call(file, entry.text, partial(spec.fused, **logical, **extra), device)
        del logical
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return len(named)


def one_call(file: Path, case: str, call: Callable[[], Any], device: torch.device) -> None:
    """Runs ``call`` if the file requests ``case``: first to warm up, then where ncu counts."""
    if case not in json.loads(file.read_text(encoding="utf-8")):
        return
    try:
        with torch.no_grad():
            for _ in range(_WARM_UPS):
                call()
            with _counted(device):
                _note(file, BEGUN, case)
                call()
    except Exception as error:  # noqa: BLE001 - whatever a call raises here, the other cases are counted
        _note(file, RAISED, case, f"the call raises {brief(error)}")
    else:
        _note(file, DONE, case)


@contextlib.contextmanager
def _counted(device: torch.device) -> Iterator[None]:
    """Lets ncu count the body, after the mark; no other worker times meanwhile."""
    if device.type != "cuda":
        yield
        return
    with alone(device), torch.cuda.device(device):
        synchronize(device)
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        try:
            torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
            yield
            synchronize(device)
        finally:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def _note(file: Path, what: str, case: str, words: str = "") -> None:
    with file.with_suffix(".steps").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps([what, case, words]) + "\n")
