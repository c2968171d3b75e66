"""The likely cause: a slug only where the smallest case stands for it."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_fusion.case.model import Case, Layout, TensorCase
from pytest_fusion.diagnosis.causes import CAUSES, likely_cause
from pytest_fusion.verdict.model import Verdict, failed


def case(*, n: Any = 3, dtype: str = "float32", layout: Layout = Layout(), regime: str = "unit") -> Case:  # noqa: B008
    return Case({"n": n}, dtype, {"x": TensorCase(dtype, layout, regime)})


VALUES = failed("values", "off", identity="values:out:finite")


ROWS = [
    (VALUES, case(), None),
    (VALUES, case(n=0), "empty-input"),
    (VALUES, case(n=(2, 0)), "empty-input"),
    (VALUES, case(layout=Layout("transposed")), "ignores-strides"),
    (VALUES, case(layout=Layout("expanded")), "ignores-zero-stride"),
    (VALUES, case(layout=Layout(offset=1)), "ignores-offset"),
    (VALUES, case(regime="nan"), "non-finite"),
    (VALUES, case(regime="huge"), "overflow"),
    (VALUES, case(regime="subnormal"), "subnormal"),
    (VALUES, case(regime="offset"), "value-range"),
    (VALUES, case(dtype="bfloat16"), "low-precision"),
    (failed("values", "", identity="values:out:nonfinite"), case(), "non-finite"),
    (failed("bounds", "", zone="after"), case(layout=Layout("padded")), "tail-write"),
    (failed("bounds", "", zone="before"), case(), "head-write"),
    (failed("bounds", "", zone="between"), case(), "gap-write"),
    (failed("bounds", ""), case(), "reads-surroundings"),
    (failed("bounds", ""), case(layout=Layout("padded")), "ignores-strides"),
    (failed("bounds", "", access="out-of-bounds-store", offset=12), case(), "tail-write"),
    (failed("bounds", "", access="out-of-bounds-store", offset=-1), case(), "head-write"),
    (failed("bounds", "", access="out-of-bounds-load"), case(), "reads-out-of-bounds"),
    (failed("bounds", "", access="out-of-bounds-load"), case(layout=Layout("transposed")), "ignores-strides"),
    (failed("bounds", "", access="gap-store"), case(), "gap-write"),
    (failed("bounds", "", access="use-after-free"), case(), "use-after-free"),
    (failed("bounds", "", access="misaligned-access"), case(layout=Layout(offset=1)), "misaligned-access"),
    (failed("bounds", "", access="false-hint"), case(layout=Layout(offset=1)), "false-hint"),
    (failed("repeat", "", access="racing-stores"), case(), "racing-stores"),
    (failed("repeat", "", access="racing-load"), case(), "racing-load"),
    (failed("invariance", "", identity="invariance:n", depends_on="size"), case(), "batch-variant"),
    (failed("gradients", "", identity="gradients:x:nonfinite", cause="gradient-layout"), case(), "gradient-layout"),
    (failed("gradients", "", cause="gradient-scale"), case(), "gradient-scale"),
    (failed("gradients", "", cause="gradient-missing"), case(), "gradient-missing"),
    (failed("gradients", "", identity="gradients:x:finite"), case(dtype="bfloat16"), "low-precision"),
    (failed("error", ""), case(), "raises"),
    (failed("structure", "", identity="structure:aliasing"), case(), "aliasing"),
    (failed("structure", "", identity="structure:out:shape"), case(), "wrong-structure"),
    (failed("inputs", ""), case(), "mutates-input"),
    (failed("unwritten", "", identity="unwritten:out"), case(), "unwritten-output"),
    (failed("unwritten", "", identity="unwritten:scratch"), case(), "uninitialised-scratch"),
    (failed("repeat", "", identity="repeat:out"), case(), "nondeterministic"),
    (failed("repeat", "", identity="repeat:stale"), case(), "stale-state"),
    (failed("repeat", "", identity="repeat:stale", cause="cached-answer"), case(), "cached-answer"),
    (failed("honesty", "", identity="honesty:late-work", cause="late-work"), case(), "late-work"),
    (failed("honesty", "", identity="honesty:tampers", cause="tampers"), case(), "tampers"),
    (failed("honesty", "", identity="honesty:caller", cause="detects-test"), case(), "detects-test"),
    (failed("configs", "", index=2, inner="values"), case(), "bad-config"),
    (failed("configs", "", inner="repeat"), case(), "autotune-side-effect"),
    (failed("vacuity", ""), None, "vacuous-test"),
    (failed("crash", "", kind="timeout"), case(), "hang"),
    (failed("crash", "", kind="signal"), case(), "crash"),
    (VALUES, None, None),
]


@pytest.mark.parametrize(("verdict", "smallest", "cause"), ROWS, ids=[f"{i} {row[2]}" for i, row in enumerate(ROWS)])
def test_the_cause_follows_from_what_the_smallest_case_needs(
    verdict: Verdict, smallest: Case | None, cause: str | None
) -> None:
    """Each row is one piece of evidence and the slug that it stands for."""
    assert likely_cause(verdict, smallest) == cause
    assert cause is None or cause in CAUSES
