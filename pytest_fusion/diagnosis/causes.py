"""The causes of failures, by slug, and the cause that a verdict names by itself."""

from __future__ import annotations

from pytest_fusion.checks import registry
from pytest_fusion.checks.verdict import HAZARDS, Verdict

CAUSES: dict[str, str] = {
    "crash": "the kernel killed its process, most often by an access far outside its memory",
    "hang": "the kernel does not return: a loop's end condition is never met",
    "device-fault": "the kernel failed an assert or made an illegal access on the device",
    "raises": "the kernel raises on an input that its spec allows",
    "does-not-compile": "Triton's compiler refuses the kernel, which the interpreter runs as Python",
    "zero-size": "a size of 0 is mishandled",
    "wrong-structure": "the result differs in shape, device, nesting or a plain value",
    "wrong-dtype": "the result has another dtype than the reference's",
    "aliasing": "a result shares memory that the caller believes to be its own",
    "mutates-input": "the kernel writes an input that it does not declare, or a result that its caller has",
    "out-of-bounds": "an access leaves the elements of its tensor: its mask is missing or too wide",
    "off-by-one-mask": "one index too many is taken in at the end of an axis",
    "use-after-free": "a pointer is used whose tensor no longer lives",
    "misaligned-access": "a pointer was cast to a wider type and is no multiple of its size",
    "false-hint": "a promise to the compiler (multiple_of, max_contiguous, max_constancy) is not kept",
    "racing-stores": "two programs, or two lanes of one, store different values to one element without an atomic",
    "racing-load": "a program loads what another one stores in the same launch",
    "reads-padding": "a load reaches between or around a tensor's elements and the result depends on what is there",
    "stale-memory": "the result depends on memory that this call did not write: fresh, or kept between calls",
    "unwritten-output": "some elements of the result are never stored",
    "nondeterministic": "two runs on the same inputs differ: a race or an order of atomics",
    "batch-variant": "a slice's bits depend on how many others there are, on its position or on what they hold",
    "cached-answer": "the kernel keeps an answer or state from an earlier call",
    "ignores-strides": "a stride is assumed: the result is right for contiguous tensors only",
    "ignores-offset": "a storage offset is ignored",
    "needs-alignment": "addresses must be multiples of a vector's width, which nothing checks",
    "int32-overflow": "an offset is computed in 32 bits and wraps",
    "tail-mask": "whole tiles are right and the last, partial one is wrong: its mask or its padding is mishandled",
    "wrong-neutral-element": "what pads a partial tile, or stands for nothing, counts in what follows",
    "block-limit": "the kernel is right up to a size and wrong above it: what is past a block or a grid is not reached",
    "capacity-overflow": "wrong only where one index occurs more often than some number",
    "uneven-data": "wrong only for some kinds of indices, offsets or pages, and right for even ones",
    "wrong-index-map": "elements are taken from, or stored to, the wrong indices",
    "low-precision-accumulation": "a sum or an intermediate is kept in too few bits",
    "cast-order": "a rounding to 16 bits happens where the reference has none",
    "missing-max-subtraction": "an exponential overflows or vanishes because its argument's maximum is not taken away",
    "overflow": "a value leaves the range of its dtype where the reference's does not",
    "eps-misplaced": "an epsilon or a floor is added in the wrong place, missing, or another one",
    "nan-mishandled": "NaN or infinity in an input makes other elements wrong, or an index or a code",
    "gradient-layout": "the gradient is right for a contiguous upstream gradient and wrong for another layout",
    "gradient-scale": "the gradient is the right one times a constant",
    "lost-output-gradient": "what flows back from one of several outputs does not reach an input's gradient",
    "upstream-overwritten": "backward writes into the upstream gradient, which other branches of the graph have too",
    "gradient-missing": "an input that the reference differentiates gets no gradient",
    "late-work": "a result still changes after it was returned: work is left on another thread or stream",
    "tampers": "a call replaces functions or settings of torch, of a timer or of the judge",
    "detects-test": "the answer is right only where a test calls",
    "seed-ignored": "the seed does not reach the kernel's random numbers: every seed gives the same",
    "mask-mismatch": "one seed gives other masks in backward, or in other layouts",
    "repeated-mask": "elements, rows, programs, seeds or calls share their random numbers",
    "biased-mask": "the share of elements that are not dropped does not follow from the probability",
    "biased-sampling": "drawn indices do not follow the reference's probabilities",
    "bad-config": "one config of an autotuned kernel is wrong where another is right",
    "autotune-side-effect": "the call that tunes a kernel gives another result than later ones",
    "extra-launch": "a call launches more kernels than it is allowed to",
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
    "unexplained": "no experiment found a cause; what they ruled out is listed",
}


def likely_cause(verdict: Verdict) -> str | None:
    """The slug that a verdict implies; ``None`` if only experiments can show one."""
    check = registry.of(verdict)
    return verdict.cause or (check.cause(verdict) if check is not None else None)


def meaning(cause: str) -> str:
    """The meaning of a slug, in a sentence."""
    return all_causes()[cause]


def all_causes() -> dict[str, str]:
    """Every code of a finding, those of plugins' checks too, with its meaning."""
    return {**CAUSES, **HAZARDS, **{slug: text for check in registry.checks() for slug, text in check.causes.items()}}
