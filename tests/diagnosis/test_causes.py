"""What a verdict stands for by itself."""

from __future__ import annotations

import pytest

from pytest_fusion.checks.verdict import DamagedMemory, ProcessEnd, Verdict, WrongAccess, WrongConfig, failed
from pytest_fusion.diagnosis.causes import CAUSES, likely_cause
from pytest_fusion.interpreter.memory.memory_findings import Finding

ROWS = [
    (failed("values", "off", identity="values:out:finite"), None),
    (failed("values", "", identity="values:out:nonfinite"), None),
    (failed("bounds", "", evidence=DamagedMemory("x", "after", 1, 1, 4)), "out-of-bounds"),
    (failed("bounds", "", evidence=DamagedMemory("x", "before", 1, 1, 4)), "out-of-bounds"),
    (failed("bounds", "", evidence=DamagedMemory("x", "between", 1, 1, 4)), "out-of-bounds"),
    (failed("bounds", "", identity="bounds:surroundings"), "reads-padding"),
    (failed("bounds", "", identity="bounds:dx"), "reads-padding"),
    (
        failed("bounds", "", evidence=WrongAccess(Finding("out-of-bounds-store", "kernel", "k.py", 1, "tl.store(x)"))),
        "out-of-bounds",
    ),
    (
        failed("bounds", "", evidence=WrongAccess(Finding("out-of-bounds-load", "kernel", "k.py", 1, "tl.store(x)"))),
        "out-of-bounds",
    ),
    (
        failed("bounds", "", evidence=WrongAccess(Finding("gap-store", "kernel", "k.py", 1, "tl.store(x)"))),
        "out-of-bounds",
    ),
    (
        failed("bounds", "", evidence=WrongAccess(Finding("use-after-free", "kernel", "k.py", 1, "tl.store(x)"))),
        "use-after-free",
    ),
    (
        failed("bounds", "", evidence=WrongAccess(Finding("misaligned-access", "kernel", "k.py", 1, "tl.store(x)"))),
        "misaligned-access",
    ),
    (
        failed("bounds", "", evidence=WrongAccess(Finding("false-hint", "kernel", "k.py", 1, "tl.store(x)"))),
        "false-hint",
    ),
    (
        failed("repeat", "", evidence=WrongAccess(Finding("racing-stores", "kernel", "k.py", 1, "tl.store(x)"))),
        "racing-stores",
    ),
    (
        failed("repeat", "", evidence=WrongAccess(Finding("racing-load", "kernel", "k.py", 1, "tl.store(x)"))),
        "racing-load",
    ),
    (failed("invariance", "", identity="invariance:n"), "batch-variant"),
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
    (failed("configs", "", inner="values", evidence=WrongConfig("kernel", {}, 2, {})), "bad-config"),
    (failed("configs", "", inner="repeat", evidence=WrongConfig("kernel", {})), "autotune-side-effect"),
    (failed("vacuity", ""), "vacuous-test"),
    (failed("crash", "", evidence=ProcessEnd("timeout", "")), "hang"),
    (failed("crash", "", evidence=ProcessEnd("signal", "")), "crash"),
    (failed("crash", "", evidence=ProcessEnd("exit", "CUDA error: device-side assert")), "device-fault"),
]


@pytest.mark.parametrize(("verdict", "cause"), ROWS, ids=[f"{i} {row[1]}" for i, row in enumerate(ROWS)])
def test_a_verdict_stands_for_its_cause(verdict: Verdict, cause: str | None) -> None:
    """Each row is one piece of evidence and the slug that it stands for; ``None``: only experiments can tell."""
    assert likely_cause(verdict) == cause
    assert cause is None or cause in CAUSES
