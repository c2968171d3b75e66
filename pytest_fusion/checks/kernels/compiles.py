"""Whether Triton's compiler takes the kernels that the CPU lane interpreted."""

from __future__ import annotations

import linecache
from contextlib import AbstractContextManager
from pathlib import PurePath

from pytest_fusion.checks.context import Context
from pytest_fusion.checks.verdict import Verdict, failed, unknown
from pytest_fusion.run.measure.resources.front_end import Launched, compiled_by_front_end, launched
from pytest_fusion.run.measure.resources.targets import Resources


def seen(context: Context) -> AbstractContextManager[None]:
    """Note the kernels that are interpreted within this block."""
    return launched(context.state(Launched))


def conclude(context: Context, _: int) -> Verdict | None:
    """A failure where a kernel is refused; ``None`` where each compiles, or none was launched."""
    state = context.state(Launched)
    if not state.known:
        return None
    with context.clock.check("error"):
        found = compiled_by_front_end(state)
    if isinstance(found, str):
        return unknown("error", f"whether the kernels compile is not known: {found}")
    refused = [one for one in found if one.status == "refused"]
    if refused:
        first = refused[0]
        listed = "; ".join(map(_refusal, refused))
        return failed(
            "error",
            f"Triton's compiler refuses {listed}. The interpreter runs any Python; no GPU can run this kernel",
            identity=f"error:does-not-compile:{first.kernel}",
            cause="does-not-compile",
            kernel=first.kernel,
            file=first.file,
            line=first.line,
        )
    reasons = {**state.problems, **{one.kernel: one.reason for one in found if one.status == "unknown"}}
    listed = "; ".join(f"{kernel}: {reason}" for kernel, reason in reasons.items())
    return unknown("error", f"whether these kernels compile is not known: {listed}") if reasons else None


def _refusal(one: Resources) -> str:
    line = linecache.getline(one.file, one.line).strip()
    return f"{one.kernel} at {PurePath(one.file).name}:{one.line} ({line}): {one.reason}"
