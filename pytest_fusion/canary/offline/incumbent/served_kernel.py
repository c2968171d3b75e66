"""`ServedKernel`: the incumbent's kernel inside its own process, and its answers as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.bench import latency, on_device
from pytest_fusion.canary.offline import paired_latency
from pytest_fusion.canary.offline.case_pairs import FOREIGN, Ran
from pytest_fusion.canary.offline.incumbent.incumbent_process import Timed
from pytest_fusion.canary.offline.kernel import Kernel, held_to, write_tensors
from pytest_fusion.case.case_model import Case
from pytest_fusion.case.stated import misfit
from pytest_fusion.checks.context import Context
from pytest_fusion.errors import CanaryError
from pytest_fusion.run.measure.launches import Uncounted
from pytest_fusion.spec.fusion_spec import FusionSpec
from pytest_fusion.spec.wording import brief


class ServedKernel:
    """The kernel of ``spec`` with the promises of ``opened``; a method for each request. Raises ``FusionError``."""

    def __init__(self, spec: FusionSpec, opened: Mapping[str, Any], device: str, extra: Mapping[str, Any]) -> None:
        spec = held_to(spec, opened["contract"])
        context = Context(
            spec, torch.device(device), extra, programs=int(opened["programs"]), deep=bool(opened["deep"])
        )
        self.kernel = Kernel(context)
        # The one batch of calls that is timed here, in turns with one in the other process.
        self._timer: Any = None

    def answer(self, message: Mapping[str, Any]) -> Any:
        """The result of the requested method, in JSON types."""
        arguments = {name: value for name, value in message.items() if name not in ("id", "op")}
        if "case" in arguments:
            arguments["case"] = Case.from_json(arguments["case"])
        return getattr(self, message["op"])(**arguments)

    def judge(self, case: Case, *, again: bool, alone: bool) -> dict[str, Any]:
        wrong = misfit(self.kernel.spec, case)
        if wrong is not None:
            return Ran("rejected", FOREIGN, f"the case does not fit its spec there: {wrong}").as_json()
        return self.kernel.judge(case, again=again, alone=alone).as_json()

    def measure(self, case: Case, file: str) -> dict[str, Any]:
        found = self.kernel.measure(case)
        if found.outputs:
            write_tensors(Path(file), found.outputs)
        facts = {name: getattr(found, name) for name in ("inputs", "reference", "memory", "problem")}
        return {**facts, "results": bool(found.outputs)}

    def count(self, case: Case) -> dict[str, Any] | str:
        counts = self.kernel.count(case)
        return counts.reason if isinstance(counts, Uncounted) else counts.as_json()

    def compiled(self, keys: Sequence[str]) -> dict[str, Any]:
        return asdict(self.kernel.compiled(keys))

    def spills(self, sized: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        return asdict(self.kernel.spills([(text, Case.from_json(case)) for text, case in sized]))

    def time(self, case: Case, what: Timed) -> str:
        kernel = self.kernel
        device = torch.device("cuda", kernel.context.device.index or 0)
        with _refusing():
            self._timer = paired_latency.timer(kernel.context, case, what, device, on_device.opened(device).cache)
        return latency.digest(kernel.spec.fused if what == "fused" else kernel.spec.reference)

    def sample(self) -> float:
        """Seconds of a call of what was last passed to `time`."""
        with _refusing():
            return float(self._timer.seconds())

    def untime(self) -> None:
        self._timer = None
        torch.cuda.empty_cache()


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the checks have judged it; here it is a number or none
        raise CanaryError(f"called there to be timed, it raised {brief(error)[:200]}") from None
