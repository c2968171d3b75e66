"""For the most usual codes of findings, the next step, as a line of a failure."""

from __future__ import annotations

from collections.abc import Mapping

REMEDIES: Mapping[str, str] = {
    "ignores-strides": "pass the strides of inputs and outputs to the kernel (torch.empty_like keeps those of its "
    "input); or copy the input (x.contiguous()); or refuse it (raise ValueError, with rejects=ValueError); or, where "
    'callers pass no others, layouts=("contiguous",) in tensor()',
    "bad-config": "correct what this config alone does (mask, grid, rest of a loop), or take it out of configs=",
    "ignores-offset": "take the pointer of the tensor, not of its storage; or copy the input (x.clone())",
    "needs-alignment": "drop the hint or the cast to a wider type, or copy inputs whose address is not aligned",
    "gradient-layout": "in backward, pass the strides of grad_output to the kernel, or call grad_output.contiguous()",
    "tail-mask": "check the mask of the last block: on every load and store, and in what is summed or compared",
    "off-by-one-mask": "compare < with <=, and what the bound is computed from",
    "out-of-bounds": "mask the access at that line: mask=offsets < n, for the last block too",
    "reads-padding": "mask the load at that line and give other=",
    "wrong-neutral-element": "give other= of the load the value that changes nothing: -inf for a maximum, 0 for a sum",
    "zero-size": "return early for an empty input; or bound the dim, where no caller has one: dims={...: dim(1)}",
    "stale-memory": "write every element of a buffer before it is read, or allocate it with torch.zeros",
    "unwritten-output": "let the grid and the mask cover every element of the output",
    "low-precision-accumulation": "keep the sum in float32 (tl.zeros(..., tl.float32)) and round once, in the store",
    "cast-order": "keep the intermediate in float32 and round once, where the reference does",
    "missing-max-subtraction": "subtract the maximum before the exponential",
    "int32-overflow": "compute the offset in 64 bits: tl.program_id(0).to(tl.int64) * stride",
    "aliasing": "return a tensor of its own (.clone()), not a view of an input",
    "cached-answer": "key the cache by everything that the answer depends on, or drop it",
    "nondeterministic": "give the sum a fixed order, or declare deterministic={'out': False} if it may vary",
    "racing-stores": "let one program write each element, or use an atomic",
    "racing-load": "use two launches, or a buffer of its own for what is loaded",
    "block-limit": "loop over blocks where a row is wider than one, and cap no grid",
    "capacity-overflow": "give a buffer, a counter or a grid room for all elements at one index; or refuse more",
    "gradient-missing": "return the gradient from backward, in the place of its input",
    "malformed-input": 'let the launcher refuse it by that line; or accept it: allow={"malformed-input": "why"}',
    "hidden-sync": "keep .item(), .tolist(), .cpu() and bool(tensor) out of the call",
    "nan-swallowed": "tl.maximum(..., propagate_nan=tl.PropagateNan.ALL), and tl.where in place of a product by a mask",
    "undefined-lanes": "give the load other=0.0",
    "tf32-products": 'tl.dot(a, b, input_precision="ieee") for float32',
    "upstream-overwritten": 'write the gradient to memory of its own; or declare clobbers="grad_outputs"',
    "less-accurate": "accumulate in float32 and round once, in the store",
    "wrong-structure": "let the test return what its kernel returned, in the shape and nesting of the reference",
    "wrong-dtype": "allocate the output in the dtype of the reference's result",
}
