"""The likely cause, from what the smallest case could not do without.

Shrinking is an experiment on every attribute of a case: what is left is needed for the failure. A slug is given only
where that evidence stands; otherwise there is none.
"""

from __future__ import annotations

from pytest_fusion.case import large, regimes
from pytest_fusion.case.model import Case
from pytest_fusion.verdict.model import Verdict

CAUSES: dict[str, str] = {
    "crash": "the kernel killed its process, most often by an access far outside its memory",
    "hang": "the kernel did not return within its time limit; a loop's end condition is never met",
    "device-fault": "the kernel failed an assert or made an illegal access on the device",
    "raises": "the kernel raises on an input that its spec allows",
    "wrong-structure": "the result differs in shape, dtype, device or nesting",
    "aliasing": "a result shares memory that the caller believes to be its own",
    "mutates-input": "the kernel writes an input that it does not declare",
    "tail-mask": "whole tiles are right and the last, partial one is wrong: its mask or its padding is mishandled",
    "tail-write": "a store reaches past the end of a tensor: its mask is missing or too wide",
    "head-write": "a store reaches before the start of a tensor",
    "gap-write": "a store lands between the elements of a strided tensor: its strides are ignored",
    "reads-out-of-bounds": "a load leaves the memory of its tensor: its mask is missing or too wide",
    "use-after-free": "a pointer is used whose tensor no longer lives",
    "misaligned-access": "a pointer was cast to a wider type and is no multiple of its size",
    "false-hint": "a promise to the compiler (multiple_of, max_contiguous, max_constancy) is not kept",
    "racing-stores": "two programs, or two lanes of one, store different values to one element without an atomic",
    "racing-load": "a program loads what another one stores in the same launch",
    "reads-surroundings": "a load reaches outside its tensor's elements and the result depends on what lies there",
    "uninitialised-scratch": "the result depends on fresh memory that nothing wrote",
    "unwritten-output": "some elements of the result are never stored",
    "nondeterministic": "two runs on the same inputs differ: a race or an order of atomics",
    "batch-variant": "a slice's bits depend on how many others there are, on where it lies or on what they hold",
    "gradient-layout": "the gradient is right for a contiguous upstream gradient and wrong for another layout",
    "gradient-scale": "the gradient is the right one times a constant",
    "gradient-missing": "an input that the reference differentiates gets no gradient",
    "stale-memory": "the result depends on what an earlier call left in memory that is kept between calls",
    "cached-answer": "the kernel returns an answer that it computed for an earlier call",
    "late-work": "a result still changes after it was returned: work is left on another thread or stream",
    "tampers": "a call replaces functions of torch, of a timer or of the judge",
    "detects-test": "the answer is right only where a test calls",
    "stale-state": "the kernel keeps an answer or state from an earlier call",
    "ignores-strides": "the error needs a tensor that is not contiguous: a stride is assumed",
    "ignores-zero-stride": "the error needs an expanded tensor (stride 0)",
    "ignores-offset": "the error needs a storage offset: alignment or the start of storage is assumed",
    "int32-overflow": "the error needs offsets beyond 2^31 elements: an index is computed in 32 bits",
    "empty-input": "the error needs a size of 0",
    "non-finite": "NaN or infinity is made, lost or moved to another element",
    "overflow": "the error needs values near the dtype's limit",
    "subnormal": "the error needs subnormal values",
    "low-precision": "the error needs a 16-bit dtype and ordinary values: a rounding or accumulation is too coarse",
    "value-range": "the error needs unusual values",
    "bad-config": "one config of an autotuned kernel is wrong where another is right",
    "autotune-side-effect": "the call that tunes a kernel gives another result than later ones",
    "wrong-fake": "an operator's fake implementation says another shape, dtype or strides than it returns",
    "operator-contract": "an operator does not do what its schema or its registration says",
    "graph-break": "torch.compile cannot take the call as one graph",
    "compile-differs": "under torch.compile the call gives another result, or raises",
    "graph-capture": "the call cannot be captured in a CUDA graph, or a replay gives another result",
    "recompiles": "more sizes than allowed make a compiler start again",
    "wrong-stream": "work is not put on the current stream: it runs before its inputs are there, or too late",
    "wrong-device": "the call goes wrong where its tensors are not on the current device",
    "hidden-sync": "the call waits for the device",
    "vacuous-test": "the test could not have failed",
}


# Causes that only say what the case looks like; an experiment that says more replaces them.
VAGUE: frozenset[str | None] = frozenset({None, "reads-surroundings", "value-range", "low-precision"})


def likely_cause(verdict: Verdict, case: Case | None) -> str | None:
    """A slug of :data:`CAUSES`, or ``None`` when the evidence names none."""
    if case is not None and verdict.check not in _NOT_OF_OFFSETS and large.KIND in _kinds(case):
        return "int32-overflow"
    direct = _from_check(verdict)
    if direct is not None or case is None:
        return direct
    tensors = case.tensors.values()
    # A read of the gaps that needs a layout is an ignored stride, and is named so before what it read.
    if any(size == 0 or (isinstance(size, tuple) and 0 in size) for size in case.sizes.values()):
        return "empty-input"
    kinds = _kinds(case)
    if "expanded" in kinds:
        return "ignores-zero-stride"
    if kinds - {"contiguous"}:
        return "ignores-strides"
    if any(tensor.layout.offset for tensor in tensors):
        return "ignores-offset"
    if verdict.check == "bounds":
        return {"out-of-bounds-load": "reads-out-of-bounds", "gap-store": "gap-write"}.get(
            str(verdict.evidence.get("access")), "reads-surroundings"
        )
    needed = {tensor.regime for tensor in tensors if tensor.regime in regimes.REGIMES and tensor.regime != "unit"}
    if needed & {"nan", "inf"}:
        return "non-finite"
    if "huge" in needed:
        return "overflow"
    if "subnormal" in needed:
        return "subnormal"
    if verdict.identity.endswith(":nonfinite"):
        return "non-finite"
    if needed:
        return "value-range"
    if case.dtype in ("float16", "bfloat16"):
        return "low-precision"
    return None


# What a kernel says or returns about such a case has other reasons.
_NOT_OF_OFFSETS = ("error", "structure", "repeat", "compile", "device", "vacuity")


def _kinds(case: Case) -> set[str]:
    return {tensor.layout.kind for tensor in case.tensors.values()}


def _from_check(verdict: Verdict) -> str | None:
    match verdict.check:
        case "crash":
            if "CUDA" in str(verdict.evidence.get("detail")):
                return "device-fault"
            return "hang" if verdict.evidence.get("kind") == "timeout" else "crash"
        case "error":
            return "raises"
        case "structure":
            return "aliasing" if verdict.identity == "structure:aliasing" else "wrong-structure"
        case "inputs":
            return "mutates-input"
        case "bounds":
            zones = {"after": "tail-write", "before": "head-write", "between": "gap-write"}
            return zones.get(str(verdict.evidence.get("zone"))) or _of_access(verdict)
        case "unwritten":
            return "uninitialised-scratch" if verdict.identity == "unwritten:scratch" else "unwritten-output"
        case "repeat":
            if verdict.identity == "repeat:stale":
                return "cached-answer" if verdict.evidence.get("cause") == "cached-answer" else "stale-state"
            if verdict.evidence.get("cause") in CAUSES:
                return str(verdict.evidence["cause"])
            return _of_access(verdict) or "nondeterministic"
        case "invariance":
            return "batch-variant"
        case "gradients" | "compile" | "device" | "honesty":
            return str(verdict.evidence["cause"]) if verdict.evidence.get("cause") in CAUSES else None
        case "configs":
            return "autotune-side-effect" if verdict.evidence.get("index") is None else "bad-config"
        case "vacuity":
            return "vacuous-test"
    return None


def _of_access(verdict: Verdict) -> str | None:
    """The slug of a wrong access that the interpreter saw; ``None`` where the layout may say more."""
    access = str(verdict.evidence.get("access"))
    if access == "out-of-bounds-store":
        return "head-write" if int(verdict.evidence.get("offset", 0)) < 0 else "tail-write"
    return access if access in CAUSES else None
