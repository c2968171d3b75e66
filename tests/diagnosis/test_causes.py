"""What a verdict stands for by itself."""

from __future__ import annotations

import pytest

from pytest_fusion.checks.verdict import Verdict, failed
from pytest_fusion.diagnosis.causes import CAUSES, likely_cause

ROWS = [
    (failed("values", "off", identity="values:out:finite"), None),
    (failed("values", "", identity="values:out:nonfinite"), None),
    (failed("bounds", "", zone="after"), "out-of-bounds"),
    (failed("bounds", "", zone="before"), "out-of-bounds"),
    (failed("bounds", "", zone="between"), "out-of-bounds"),
    (failed("bounds", "", identity="bounds:surroundings"), "reads-padding"),
    (failed("bounds", "", identity="bounds:dx"), "reads-padding"),
    (failed("bounds", "", access="out-of-bounds-store", offset=12), "out-of-bounds"),
    (failed("bounds", "", access="out-of-bounds-load"), "out-of-bounds"),
    (failed("bounds", "", access="gap-store"), "out-of-bounds"),
    (failed("bounds", "", access="use-after-free"), "use-after-free"),
    (failed("bounds", "", access="misaligned-access"), "misaligned-access"),
    (failed("bounds", "", access="false-hint"), "false-hint"),
    (failed("repeat", "", access="racing-stores"), "racing-stores"),
    (failed("repeat", "", access="racing-load"), "racing-load"),
    (failed("invariance", "", identity="invariance:n", depends_on="size"), "batch-variant"),
    (failed("gradients", "", identity="gradients:x:nonfinite", cause="gradient-layout"), "gradient-layout"),
    (failed("gradients", "", cause="gradient-scale"), "gradient-scale"),
    (failed("gradients", "", cause="gradient-missing"), "gradient-missing"),
    (failed("gradients", "", identity="gradients:x:finite"), None),
    (failed("error", ""), "raises"),
    (failed("structure", "", identity="structure:aliasing"), "aliasing"),
    (failed("structure", "", identity="structure:out:shape"), "wrong-structure"),
    (failed("structure", "", identity="structure:out:dtype"), "wrong-dtype"),
    (failed("inputs", ""), "mutates-input"),
    (failed("unwritten", "", identity="unwritten:out"), "unwritten-output"),
    (failed("unwritten", "", identity="unwritten:scratch"), "stale-memory"),
    (failed("repeat", "", identity="repeat:out"), "nondeterministic"),
    (failed("repeat", "", identity="repeat:stale"), "cached-answer"),
    (failed("repeat", "", identity="repeat:sizes", cause="stale-memory"), "stale-memory"),
    (failed("honesty", "", identity="honesty:late-work", cause="late-work"), "late-work"),
    (failed("honesty", "", identity="honesty:tampers", cause="tampers"), "tampers"),
    (failed("honesty", "", identity="honesty:caller", cause="detects-test"), "detects-test"),
    (failed("compile", "", identity="compile:wrong-fake", cause="wrong-fake"), "wrong-fake"),
    (failed("device", "", identity="device:hidden-sync", cause="hidden-sync"), "hidden-sync"),
    (failed("configs", "", index=2, inner="values"), "bad-config"),
    (failed("configs", "", inner="repeat"), "autotune-side-effect"),
    (failed("vacuity", ""), "vacuous-test"),
    (failed("crash", "", kind="timeout"), "hang"),
    (failed("crash", "", kind="signal"), "crash"),
    (failed("crash", "", kind="exit", detail="CUDA error: device-side assert"), "device-fault"),
]


@pytest.mark.parametrize(("verdict", "cause"), ROWS, ids=[f"{i} {row[1]}" for i, row in enumerate(ROWS)])
def test_a_verdict_stands_for_its_cause(verdict: Verdict, cause: str | None) -> None:
    """Each row is one piece of evidence and the slug that it stands for; ``None``: only experiments can tell."""
    assert likely_cause(verdict) == cause
    assert cause is None or cause in CAUSES
