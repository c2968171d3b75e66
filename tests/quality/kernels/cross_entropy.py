# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Cross entropy with ``ignore_index``, float32 inside and out.

``logits`` is ``(rows, vocab)``, ``target`` an int64 ``(rows,)``. The result is ``{"losses": (rows,), "mean": ()}``:
an ignored row has loss 0 and does not count, and the mean over no rows is 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pytest_fusion import FusionSpec, derived, dim, tensor

Result = dict[str, Tensor]
BLOCK = 64


def reference(logits: Tensor, target: Tensor, ignore_index: int) -> Result:
    losses = functional.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="none")
    return {"losses": losses, "mean": losses.sum() / (target != ignore_index).sum().clamp(min=1)}


def logsumexp_reference(logits: Tensor, target: Tensor, ignore_index: int) -> Result:
    """As kernels that keep the log-sum-exp compute it: ``lse - logit``, rounded as the larger of the two is."""
    x = logits.float()
    top = x.amax(-1)
    lse = torch.log(torch.exp(x - top[:, None]).sum(-1)) + top
    chosen = x.gather(-1, target.clamp(min=0)[:, None]).squeeze(-1)
    losses = torch.where(target == ignore_index, 0.0, lse - chosen)
    return {"losses": losses, "mean": losses.sum() / (target != ignore_index).sum().clamp(min=1)}


@triton.jit
def loss_kernel(
    logits, target, losses, vocab, row_pitch, col_pitch, target_pitch, ignore_index,
    KEEP_LSE: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(target + row * target_pitch)
    if BUG == "hard-coded-ignore":
        ignore_index = -100
    if label == ignore_index:
        if BUG != "leaves-ignored":
            tl.store(losses + row, 0.0)
        return
    end = vocab
    if BUG == "floor-blocks":
        end = vocab // BLOCK * BLOCK
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, end, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_pitch + c * col_pitch, mask=c < vocab, other=-float("inf")).to(tl.float32)
        if BUG == "no-max":
            shift = tl.zeros([], tl.float32)
            higher = shift
        else:
            higher = tl.maximum(top, tl.max(x, axis=0))
            shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(tl.where(top == -float("inf"), 0.0, top - shift)) + tl.sum(tl.exp(x - shift), axis=0)
        top = higher
    chosen = tl.load(logits + row * row_pitch + label * col_pitch).to(tl.float32)
    if KEEP_LSE:
        loss = (tl.log(total) + top) - chosen
    else:
        loss = tl.log(total) + (top - chosen)
    tl.store(losses + row, loss)


@triton.jit
def mean_kernel(
    losses, target, mean, rows, target_pitch, ignore_index, BLOCK: tl.constexpr, BUG: tl.constexpr
):  # fmt: skip
    total = tl.zeros([BLOCK], tl.float32)
    counted = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        r = start + tl.arange(0, BLOCK)
        total += tl.load(losses + r, mask=r < rows, other=0.0)
        label = tl.load(target + r * target_pitch, mask=r < rows, other=ignore_index)
        counted += (label != ignore_index).to(tl.int32)
    count = tl.sum(counted, axis=0)
    if BUG == "mean-over-all":
        count = rows
    if BUG != "no-clamp":
        count = tl.maximum(count, 1)
    tl.store(mean, tl.sum(total, axis=0) / count)


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, *, keep_lse: bool = False, bug: str = ""
) -> Result:
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    mean = torch.empty((), dtype=torch.float32, device=logits.device)
    if rows:
        loss_kernel[(rows,)](
            logits, target, losses, vocab, *logits.stride(), target.stride(0), ignore_index,
            KEEP_LSE=keep_lse, BLOCK=BLOCK, BUG=bug,
        )  # fmt: skip
    mean_kernel[(1,)](losses, target, mean, rows, target.stride(0), ignore_index, BLOCK=BLOCK, BUG=bug)
    return {"losses": losses, "mean": mean}


@triton.jit
def split_kernel(logits, tops, totals, vocab, splits, row_pitch, col_pitch, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    c = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_pitch + c * col_pitch, mask=c < vocab, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    tl.store(tops + row * splits + split, top)
    tl.store(totals + row * splits + split, tl.sum(tl.exp(x - shift), axis=0))


@triton.jit
def merge_kernel(
    logits, target, tops, totals, losses, splits, row_pitch, col_pitch, target_pitch, ignore_index, SPLITS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(target + row * target_pitch)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        return
    s = tl.arange(0, SPLITS)
    top = tl.load(tops + row * splits + s, mask=s < splits, other=-float("inf"))
    total = tl.load(totals + row * splits + s, mask=s < splits, other=0.0)
    highest = tl.max(top, axis=0)
    weight = tl.where(top == -float("inf"), 0.0, tl.exp(top - highest))
    chosen = tl.load(logits + row * row_pitch + label * col_pitch).to(tl.float32)
    # A NaN sits in ``total`` of its split, whatever became of the maxima.
    tl.store(losses + row, tl.log(tl.sum(total * weight, axis=0)) + (highest - chosen))


def cross_entropy_split(logits: Tensor, target: Tensor, ignore_index: int) -> Result:
    """The vocabulary in splits of 64 that are merged by a second kernel."""
    rows, vocab = logits.shape
    splits = triton.cdiv(vocab, BLOCK)
    tops = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
    totals = torch.empty_like(tops)
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        split_kernel[(rows, splits)](logits, tops, totals, vocab, splits, *logits.stride(), BLOCK=BLOCK)
        merge_kernel[(rows,)](
            logits, target, tops, totals, losses, splits, *logits.stride(), target.stride(0), ignore_index,
            SPLITS=triton.next_power_of_2(splits),
        )  # fmt: skip
    counted = (target != ignore_index).sum().clamp(min=1)
    return {"losses": losses, "mean": losses.sum() / counted}


def draw_target(rows: int, vocab: int, ignore_index: int, generator: torch.Generator) -> Tensor:
    """Labels of which about a third, at times all or none, are ignored."""
    device = generator.device
    label = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    share = torch.randint(0, 4, (), generator=generator, device=device) / 3
    ignored = torch.rand(rows, generator=generator, device=device) < share
    return torch.where(ignored, ignore_index, label)


def make_spec(bug: str = "", *, kind: str = "online") -> FusionSpec:
    def fused(logits: Tensor, target: Tensor, ignore_index: int) -> Result:
        if kind == "split":
            return cross_entropy_split(logits, target, ignore_index)
        return cross_entropy(logits, target, ignore_index, keep_lse=kind == "lse", bug=bug)

    return FusionSpec(
        name=f"cross_entropy {bug or kind}",
        fused=fused,
        reference=logsumexp_reference if kind == "lse" else reference,
        inputs={
            "logits": tensor("rows vocab"),
            "target": derived(draw_target),
            "ignore_index": st.sampled_from([-100, -1]),
        },
        dims={"rows": dim(0, 12), "vocab": dim(1, 300)},
    )
