"""`HAZARDS`: codes of findings that users should know of, with which ordinary callers get right results."""

from __future__ import annotations

from collections.abc import Mapping

# The meaning of each code as a clause after "hazard:", those about numbers first. Other codes are causes
# (`diagnosis.causes`).
HAZARDS: Mapping[str, str] = {
    "nan-swallowed": "the reference is not finite where the kernel is",
    "undefined-lanes": "the result depends on masked lanes of a load without other=, which Triton leaves undefined",
    "upstream-overwritten": "backward writes into the upstream gradient",
    "less-accurate": "less accurate than the reference, and within the fence of eager PyTorch in this dtype",
    "tf32-products": "float32 factors of a product are rounded to TF32, tl.dot's default on a GPU",
    "config-variant-bits": "the bits of the result depend on which autotune config wins",
    "malformed-input": "a call that breaks the spec is neither refused nor right",
    "second-backward": "a second backward through a retained graph gives something else",
    "refuses": "the launcher refuses some cases",
    "hidden-sync": "the kernel waits for the device",
    "loose-tolerance": "the tolerance of the spec would also pass the next lower precision",
    "second-derivative": "a derivative of the gradient is missing or wrong",
}
