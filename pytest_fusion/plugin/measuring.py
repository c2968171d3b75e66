"""The fixture `fusion_bench`: a call that is judged and measured under ``--fusion-bench``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pytest_fusion.bench.concrete_calls import Pair, case_text, measure, remembers
from pytest_fusion.bench.latency import digest
from pytest_fusion.bench.measured import Measured
from pytest_fusion.bench.on_device import opened
from pytest_fusion.bench.profiled import one_call
from pytest_fusion.engine.outcome import failure_of, with_bench
from pytest_fusion.errors import FusionError
from pytest_fusion.plugin import active
from pytest_fusion.plugin.check import arguments_by_name, by_name, check_equivalent, device_of, name_of
from pytest_fusion.report import environment
from pytest_fusion.report.record import TestRecord

_REMEMBERED = (
    "other values were written into its arguments, and it returned the result of the earlier ones; a cache of results "
    "needs the version of each tensor in its key (t._version), or is to be left out"
)


class FusionBench:
    """``fusion_bench(fused, reference, *args, case=None, **kwargs)``, for one test; returns the result of ``fused``.

    If ``measured``, ``check_equivalent`` judges the result first, and the test's record gets the costs of both calls
    under the name ``case``, by default the shapes and dtypes of the arguments. ``profiled`` is the file of cases for a
    process under ncu, which only calls them once more.
    """

    def __init__(self, *, measured: bool, profiled: Path | None = None) -> None:
        self._measured = measured
        self._profiled = profiled
        self._names: Counter[str] = Counter()

    def __call__(
        self,
        fused: Callable[..., Any],
        reference: Callable[..., Any],
        /,
        *args: Any,
        case: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Raises ``FusionFailure`` for a measured result that is wrong or costs more than its baseline, ``FusionError``
        for a second equal ``case``, and what the functions raise."""
        __tracebackhide__ = True
        if self._measured or self._profiled is not None:
            names, inputs = arguments_by_name(reference, args, kwargs)
            text, device = self._named(case, inputs), torch.device(device_of(inputs))
            ours, theirs = by_name(fused, names), by_name(reference, names)
            if self._profiled is not None:
                one_call(self._profiled, text, partial(ours, **inputs), device)
            else:
                pair = Pair(ours, theirs, inputs, device, digest(reference))
                _measure(pair, text, name_of(fused), partial(check_equivalent, fused, reference, *args, **kwargs))
        return fused(*args, **kwargs)

    def _named(self, case: str | None, inputs: Mapping[str, Any]) -> str:
        """The case's name, unique in the test."""
        text = case or case_text(inputs)
        self._names[text] += 1
        if self._names[text] == 1:
            return text
        if case is not None:
            raise FusionError(
                f"fusion_bench has measured case={case!r} in this test already; give this one its own name"
            )
        return f"{text} #{self._names[text]}"


def _measure(pair: Pair, text: str, name: str, judge: Callable[[], TestRecord]) -> None:
    """Judges the calls, measures right ones, and adds both results to the record of the running test."""
    __tracebackhide__ = True
    running = active.current()
    wanted = running.make_request().bench if running is not None else None
    if running is None or wanted is None:
        raise FusionError("fusion_bench measures in the body of a test; call it there, and not in a fixture")
    record = judge()
    if record.verdict != "pass":
        why = record.message or ", ".join(record.rejected) or "nothing could be judged"
        found = Measured(notes=[f"{text}: not measured: it is not known to be right ({why})"])
        record = replace(record, bench=found.as_json())
    elif remembers(pair):
        message = f"{name}: honesty failed\n  {_REMEMBERED}"
        record = replace(record, verdict="fail", failed_check="honesty", cause=None, message=message)
    else:
        identity = opened(pair.device).facts if pair.device.type == "cuda" else {}
        known = environment.describe(str(pair.device), **identity)
        found = measure(pair, wanted, nodeid=record.nodeid, case=text, environment=known)
        record = with_bench(record, found, wanted, name)
    running.records[-1] = record
    if record.verdict == "fail":
        raise failure_of(record)
