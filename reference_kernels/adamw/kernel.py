"""Fused AdamW: one launch for any number of tensors, found through a table of addresses on the device."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from reference_kernels._common import FLOATS, INTERPRETED, check_tensor, jit, placed

ALIGNMENT = 16  # bytes of the widest load
FIELDS = 7  # of a tensor's row of the table: five addresses, the number of elements, whether all are aligned
MOST_TABLES = 16  # tables: the last that were used
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements of one tensor per program, how many of them at a time, and warps."""

    elements: int
    block: int
    warps: int


def config(*, interpreted: bool = INTERPRETED) -> Chunk:
    """The same for every tensor. 8 elements a thread are two loads of 16 bytes from each float32 tensor, eight under
    way at once; a chunk of four such blocks shares what it takes to find its tensor."""
    return Chunk(256, 64, 1) if interpreted else Chunk(4096, 1024, 4)


@jit
def _aligned(pointer: tl.tensor, at: tl.tensor, ALIGNED: tl.constexpr) -> tl.tensor:
    """``pointer + at``; the compiler learns that 16 bytes are together, which it cannot know of a table's addresses.

    It forgets a hint on a pointer made from a number (Triton 3.7), so the hint is on the sum; and on the pointer too,
    because that is what the interpreter checks.
    """
    if ALIGNED:
        return tl.multiple_of(tl.multiple_of(pointer, 16) + at, 16)
    return pointer + at


@jit
def _update(
    parameter: tl.tensor,
    gradient: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    master: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    root: tl.tensor,
    eps: tl.tensor,
    HAS_MASTER: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:
    """One block of one tensor, in float32."""
    parameters = _aligned(parameter, at, ALIGNED)
    gradients = _aligned(gradient, at, ALIGNED)
    firsts = _aligned(first, at, ALIGNED)
    seconds = _aligned(second, at, ALIGNED)
    masters = parameters
    if HAS_MASTER:
        masters = _aligned(master, at, ALIGNED)
    g = tl.load(gradients, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(firsts, mask=inside, other=0.0)
    v = tl.load(seconds, mask=inside, other=0.0)
    wide = tl.load(masters, mask=inside, other=0.0).to(tl.float32)
    m += (g - m) * rest1
    v = v * beta2 + g * g * rest2
    wide = wide * decay - m / (tl.sqrt(v) / root + eps) * rate
    tl.store(firsts, m, mask=inside)
    tl.store(seconds, v, mask=inside)
    if HAS_MASTER:
        tl.store(masters, wide, mask=inside)
    tl.store(parameters, wide, mask=inside)


@jit
def _adamw_kernel(
    table_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    root: tl.tensor,
    eps: tl.tensor,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    FIELDS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One chunk: its tensor's row of ``table``, ``(tensors, FIELDS)``, and its number there are in ``chunks``, 32 bits
    each."""
    chunk = tl.load(chunks_ptr + tl.program_id(0))
    row = table_ptr + (chunk >> 32) * FIELDS
    parameter = tl.load(row).to(tl.pointer_type(PARAMETER))
    gradient = tl.load(row + 1).to(tl.pointer_type(GRADIENT))
    first = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    second = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    master = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    numel = tl.load(row + 5)
    aligned = tl.load(row + 6)
    begin = (chunk & 0xFFFFFFFF) * CHUNK
    for offset in range(0, CHUNK, BLOCK):
        start = begin + offset
        at = start + tl.arange(0, BLOCK)
        if (start + BLOCK <= numel) & (aligned != 0):
            # A mask that is always true leaves wide loads wide.
            _update(
                parameter, gradient, first, second, master, at, tl.full([BLOCK], 1, tl.int1), decay, rate, rest1, beta2,
                rest2, root, eps, HAS_MASTER, True,
            )  # fmt: skip
        else:
            _update(
                parameter, gradient, first, second, master, at, at < numel, decay, rate, rest1, beta2, rest2, root, eps,
                HAS_MASTER, False,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Table:
    """What `_adamw_kernel` reads of the tensors of one call: ``rows`` int64 ``(tensors, FIELDS)``, ``chunks`` int64.

    ``host`` is the pinned memory that both are copied from, which a replayed CUDA graph reads again.
    """

    rows: torch.Tensor
    chunks: torch.Tensor
    host: torch.Tensor


_tables: OrderedDict[Any, _Table] = OrderedDict()
_captured: list[_Table] = []  # a graph holds addresses and no references


def _table(lists: Sequence[Sequence[torch.Tensor]]) -> _Table:
    """The table of these tensors, made once for their addresses; raises what `_check` raises.

    One that is made anew, as where gradients are freed after each step, takes a copy to the device that nothing waits
    for. The stream is part of the key: that copy is in order with its launches alone.
    """
    flat = [tensor for group in lists for tensor in group]
    device = flat[0].device
    cuda = device.type == "cuda"
    key = (
        device,
        torch.cuda.current_stream(device).cuda_stream if cuda else 0,
        *map(len, lists),
        *((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in flat),
    )
    found = _tables.get(key)
    if found is None:
        _check(lists)
        found = _tables[key] = _made(lists, device)
        while len(_tables) > MOST_TABLES:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    if cuda and torch.cuda.is_current_stream_capturing():
        _captured.append(found)
    return found


def _made(lists: Sequence[Sequence[torch.Tensor]], device: torch.device) -> _Table:
    size = config().elements
    rows, counts = [], []
    for tensors in zip(*lists, strict=True):
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = all(address % ALIGNMENT == 0 for address in addresses)
        rows.append([*addresses, *[0] * (5 - len(addresses)), tensors[0].numel(), int(aligned)])
        counts.append(triton.cdiv(tensors[0].numel(), size))
    count = torch.tensor(counts)
    owner = torch.repeat_interleave(torch.arange(len(rows)), count)
    number = torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
    host = torch.cat((torch.tensor(rows).view(-1), (owner << 32) | number))
    if device.type == "cuda":
        host = host.pin_memory()
    words = host.to(device, non_blocking=True)
    return _Table(words[: FIELDS * len(rows)], words[FIELDS * len(rows) :], host)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one piece of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _alike(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` have the order of ``parameter``'s in memory."""
    return all(
        size <= 1 or own == other
        for size, own, other in zip(parameter.shape, tensor.stride(), parameter.stride(), strict=True)
    )


NAMES = ("parameters", "gradients", "first", "second", "masters")


def _check(lists: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raise `TypeError` or `ValueError` for tensors that the kernel does not take."""
    parameters = lists[0]
    like = parameters[0]
    gradient = like.dtype if lists[1][0].dtype == like.dtype else torch.float32
    allowed = (like.dtype,), (gradient,), *[(torch.float32,)] * 3
    for name, group, dtypes in zip(NAMES, lists, allowed, strict=False):
        for index, (tensor, parameter) in enumerate(zip(group, parameters, strict=True)):
            label = f"{name}[{index}]"
            check_tensor("adamw", label, tensor, like, dtypes)
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"adamw: {label} has shape {tuple(tensor.shape)}, its parameter {tuple(parameter.shape)}"
                )
            if tensor.numel() and not (_dense(tensor) and _alike(tensor, parameter)):
                raise ValueError(
                    f"adamw: {label} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, its parameter "
                    f"{parameter.stride()}; parameters, moments and masters must be dense, and lie in memory alike"
                )


def _launch(table: _Table, lists: Sequence[Sequence[torch.Tensor]], numbers: tuple[float, ...]) -> None:
    if len(table.chunks) == 0:
        return
    chunk = config()
    with placed(table.rows.device):
        _adamw_kernel[(len(table.chunks),)](
            table.rows,
            table.chunks,
            *numbers,
            PARAMETER=TYPES[lists[0][0].dtype],
            GRADIENT=TYPES[lists[1][0].dtype],
            HAS_MASTER=len(lists) > 4,
            FIELDS=FIELDS,
            CHUNK=chunk.elements,
            BLOCK=chunk.block,
            num_warps=chunk.warps,
        )


@torch.library.custom_op("reference_kernels::adamw", mutates_args=("parameters", "first", "second", "masters"))
def _adamw(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    gradients = [
        gradient
        if gradient.shape != parameter.shape or (_alike(gradient, parameter) and _dense(gradient))
        else torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]
    lists = parameters, gradients, first, second, *([masters] if masters else [])
    numbers = 1 - lr * weight_decay, lr / (1 - beta1**step), 1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2**step)
    _launch(_table(lists), lists, (*numbers, eps))


@_adamw.register_fake
def _(*_: object) -> None:
    return None


def adamw(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    first: Sequence[torch.Tensor],
    second: Sequence[torch.Tensor],
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    masters: Sequence[torch.Tensor] | None = None,
) -> None:
    """Step number ``step`` (from 1) of AdamW on all ``parameters`` in one launch, in place: see `adamw_reference`.

    Lists of one length, a tensor of any shape in each: ``parameters`` of one dtype, float32, float16 or bfloat16,
    ``gradients`` of one dtype, that or float32; the moments ``first`` and ``second``, and ``masters`` where given, in
    float32. Written are all but the gradients; those are dense and lie in memory like their parameter, a gradient that
    does not is copied first. No two tensors that are written may share memory. Raises `TypeError` for other or mixed
    dtypes; `ValueError` for lists or shapes that do not fit, strides, numbers out of range, or mixed devices.
    """
    lists = [parameters, gradients, first, second, *([] if masters is None else [masters])]
    if len({len(group) for group in lists}) > 1:
        found = ", ".join(f"{len(group)} {name}" for name, group in zip(NAMES, lists, strict=False))
        raise ValueError(f"adamw: {found}; the lists must be of one length")
    if step < 1:
        raise ValueError(f"adamw: step is {step}; the first one is 1")
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"adamw: betas are {betas}, allowed: 0 up to 1, without 1")
    if not (lr >= 0 and eps >= 0 and weight_decay >= 0):
        raise ValueError(f"adamw: lr={lr}, eps={eps}, weight_decay={weight_decay}; none of them may be negative")
    if not parameters:
        return
    check_tensor("adamw", "parameters[0]", parameters[0], parameters[0], FLOATS)
    for name, group in zip(NAMES, lists, strict=False):
        for index, tensor in enumerate(group):
            if tensor.device != parameters[0].device:  # of which one decides what runs
                check_tensor("adamw", f"{name}[{index}]", tensor, parameters[0], (tensor.dtype,))
    with torch.no_grad():
        _adamw(
            list(parameters),
            list(gradients),
            list(first),
            list(second),
            list(masters or ()),
            step,
            float(lr),
            *map(float, betas),
            float(eps),
            float(weight_decay),
        )
