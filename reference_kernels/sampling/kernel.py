"""Fused sampling: penalty, temperature, top-k, top-p and the draw of a token for each row, in one launch, sort-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from reference_kernels._common import (
    FLOATS,
    INTERPRETED,
    Rows,
    broadcast,
    broadcasts,
    check_tensor,
    jit,
    placed,
    row_offset,
)
from reference_kernels._order import of_order_key, order_key
from reference_kernels.sampling.draw import LEAST, NO_TOKEN, drawn, masses_before, penalized, totals, weight
from reference_kernels.sampling.threshold import edge_of, end_of_ties, search

INTEGERS = (torch.int32, torch.int64)
WIDEST = 2**31 - 2**16  # token numbers are int32 in the list of candidates, and tiles go past the end


@dataclass(frozen=True, slots=True)
class Tile:
    """Lanes, tokens of a lane at a time, candidates searched at a time, warps, and how many programs share the rows."""

    block: int
    deep: int
    search: int
    warps: int
    programs: int


def config(
    rows: int,
    vocab: int,
    device: torch.device,
    counted: bool = False,
    weighed: bool = False,
    *,
    interpreted: bool = INTERPRETED,
) -> Tile:
    """Tile for ``rows`` rows of ``vocab`` tokens, with top-k if ``counted``, with top-p if ``weighed``.

    Without a cut 512 threads of 86 registers read a row. With top-p alone a row in twenty takes longer than the others,
    for which 1024 threads do better. With top-k what follows the first pass is short and waits much, so there are more
    programs of 256 threads. The tile follows the vocabulary and the cuts, the number of programs changes no result.
    Interpreted, tiles are small and programs take several rows, so that small cases have several of both.
    """
    if interpreted:
        block = min(256 if vocab <= 1024 else 1024, max(16, triton.next_power_of_2(vocab)))
        return Tile(block, 1 if vocab <= block else 2, min(block, 128), 4, max(1, min(rows, 64)))
    block = min(1024 if counted else 4096 if weighed else 2048, max(128, triton.next_power_of_2(vocab)))
    deep = max(1, min(4, triton.next_power_of_2(triton.cdiv(vocab, block))))
    on_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 132
    programs = max(1, min(rows, (4 if counted else 2) * processors))
    return Tile(block, deep, min(block, 512), max(1, min(32, block // 128)), programs)


@jit
def _of_row(
    number: tl.tensor,
    row: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    DTYPE: tl.constexpr,
    BY_ROW: tl.constexpr,
) -> tl.tensor:
    """A number that is the same for all rows, or is in memory for each."""
    if BY_ROW:
        value = tl.load(number + row_offset(row, size1, size2, stride0, stride1, stride2)).to(DTYPE)
    else:
        value = tl.full([], number, DTYPE)
    return value


@jit
def _listed(
    values: tl.tuple,
    keys: tl.tensor,
    tokens: tl.tensor,
    lanes: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    floor: tl.tensor,
    HAS_SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
) -> tl.tensor:
    """List keys and tokens of all logits from ``floor`` up, in some order; how many. Only lanes whose largest logit is
    one of them are read, which for a small k are few."""
    GROUP: tl.constexpr = BLOCK // STRIP
    held = (order_key(top) >= floor).to(tl.int32)
    tl.store(lanes + tl.cumsum(held, axis=0) - 1, tl.arange(0, BLOCK), mask=held > 0)
    tl.debug_barrier()
    some = tl.sum(held, axis=0)
    count = tl.full([], 0, tl.int32)
    member = tl.arange(0, GROUP)[None, :]
    strip = tl.arange(0, STRIP)[:, None].to(tl.int64) * BLOCK
    for group in range(0, some, GROUP):
        lane = tl.load(lanes + group + member, mask=group + member < some, other=0)
        for start in range(0, width, STRIP * BLOCK):
            at = start + strip + lane
            inside = (at < width) & (group + member < some)
            key = order_key(penalized(values, at, inside, HAS_SEEN))
            wanted = tl.reshape((inside & (key >= floor)).to(tl.int32), [BLOCK])
            place = count + tl.cumsum(wanted, axis=0) - 1
            tl.store(keys + place, tl.reshape(key, [BLOCK]), mask=wanted > 0)
            tl.store(tokens + place, tl.reshape(at, [BLOCK]).to(tl.int32), mask=wanted > 0)
            count += tl.sum(wanted, axis=0)
    tl.debug_barrier()
    return count


@jit
def _of_whole_row(
    values: tl.tuple,
    unused: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    mass: tl.tensor,
    peak: tl.tensor,
    rate: tl.tensor,
    p: tl.tensor,
    seed: tl.tensor,
    number: tl.tensor,
    WEIGHED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    DEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIP: tl.constexpr,
) -> tl.tensor:
    """A token of all those of a row, or with ``p`` below 1 of its nucleus."""
    mass *= weight(top, peak, rate)
    goal = tl.maximum(p * tl.sum(mass, axis=0), 1e-30)
    bound = tl.full([], float("-inf"), tl.float32)
    return drawn(
        values, unused, unused, width, mass, peak, rate, bound, 0, goal, p < 1.0, seed, number,
        WEIGHED, False, HAS_SEEN, DEEP, BLOCK, STRIP,
    )  # fmt: skip


@jit
def _warm(
    values: tl.tuple,
    keys: tl.tensor,
    tokens: tl.tensor,
    lanes: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    mass: tl.tensor,
    peak: tl.tensor,
    rate: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    seed: tl.tensor,
    number: tl.tensor,
    COUNTED: tl.constexpr,
    WEIGHED: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    DEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH: tl.constexpr,
    STRIP: tl.constexpr,
) -> tl.tensor:
    """A token of a row without NaN and +inf at a temperature that is not 0; -1 where all are -inf."""
    bound = tl.full([], float("-inf"), tl.float32)
    last = tl.full([], 0, tl.int32)
    weighed = p < 1.0
    counted = (k > 0) & (k < width)
    p = tl.maximum(p, 0.0)
    token = tl.full([], -1, tl.int32)
    if COUNTED:
        if counted:
            high = order_key(peak)
            floor = order_key(tl.full([], LEAST, tl.float32))
            tl.debug_barrier()  # the list of the row before has been read
            if k <= SEARCH:
                # The k-th largest of maxima of disjoint parts is no larger than the k-th largest of all.
                parts = tl.max(tl.reshape(order_key(top), [BLOCK // SEARCH, SEARCH]), axis=0)
                tl.store(keys + tl.arange(0, SEARCH), parts)
                tl.debug_barrier()
                floor, end = search(keys, tl.full([], SEARCH, tl.int32), floor, high, k, SEARCH)
                tl.debug_barrier()
            count = _listed(values, keys, tokens, lanes, width, top, floor, HAS_SEEN, BLOCK, STRIP)
            if k < count:
                low, end = search(keys, count, floor, high, k, SEARCH)
                edge, tied, above = edge_of(keys, count, low, end, SEARCH)
                bound = of_order_key(edge)
                last = tl.full([], NO_TOKEN, tl.int32)
                spare = k.to(tl.int32) - above
                if spare < tied:
                    last = end_of_ties(keys, tokens, count, edge, spare, width, SEARCH)
            mass = masses_before(values, keys, tokens, count, peak, rate, bound, last, True, HAS_SEEN, 1, BLOCK)
            goal = tl.maximum(p * tl.sum(mass, axis=0), 1e-30)
            token = drawn(
                values, keys, tokens, count, mass, peak, rate, bound, last, goal, weighed, seed, number,
                WEIGHED, True, HAS_SEEN, 1, BLOCK, STRIP,
            )  # fmt: skip
        else:
            token = _of_whole_row(
                values, keys, width, top, mass, peak, rate, p, seed, number, WEIGHED, HAS_SEEN, DEEP, BLOCK, STRIP
            )
    else:
        token = _of_whole_row(
            values, keys, width, top, mass, peak, rate, p, seed, number, WEIGHED, HAS_SEEN, DEEP, BLOCK, STRIP
        )
    return token


# A width of 1 as a constant is more than the compiler of Triton 3.6.0 survives.
@partial(jit, do_not_specialize=["width"])
def _sample_kernel(
    y_ptr: tl.tensor,
    scratch_ptr: tl.tensor,
    x_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    penalty_ptr: tl.tensor,
    seed: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    x_stride0: tl.tensor,
    x_stride1: tl.tensor,
    x_stride2: tl.tensor,
    x_step: tl.tensor,
    seen_stride0: tl.tensor,
    seen_stride1: tl.tensor,
    seen_stride2: tl.tensor,
    seen_step: tl.tensor,
    temperature_stride0: tl.tensor,
    temperature_stride1: tl.tensor,
    temperature_stride2: tl.tensor,
    top_k_stride0: tl.tensor,
    top_k_stride1: tl.tensor,
    top_k_stride2: tl.tensor,
    top_p_stride0: tl.tensor,
    top_p_stride1: tl.tensor,
    top_p_stride2: tl.tensor,
    penalty_stride0: tl.tensor,
    penalty_stride1: tl.tensor,
    penalty_stride2: tl.tensor,
    HAS_SEEN: tl.constexpr,
    COUNTED: tl.constexpr,
    WEIGHED: tl.constexpr,
    TEMPERATURE_BY_ROW: tl.constexpr,
    TOP_K_BY_ROW: tl.constexpr,
    TOP_P_BY_ROW: tl.constexpr,
    PENALTY_BY_ROW: tl.constexpr,
    ALIGNED: tl.constexpr,
    DEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH: tl.constexpr,
    STRIP: tl.constexpr,
) -> None:
    """Every ``num_programs``-th row. Of scratch memory each program has ``room`` numbers for the keys of candidates, as
    many for their tokens, and ``BLOCK`` for lanes."""
    if ALIGNED:
        width = width // 16 * 16  # it is a multiple: so the compiler knows, and loads vectors under masks
    lane = tl.arange(0, BLOCK)
    keys = scratch_ptr + tl.program_id(0).to(tl.int64) * (2 * room + BLOCK)
    tokens = keys + room
    lanes = tokens + room
    for number in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.full([], number, tl.int64)
        x_row = x_ptr + row_offset(row, size1, size2, x_stride0, x_stride1, x_stride2)
        seen_row = seen_ptr
        if HAS_SEEN:
            seen_row = seen_ptr + row_offset(row, size1, size2, seen_stride0, seen_stride1, seen_stride2)
        temperature = _of_row(
            temperature_ptr,
            row,
            size1,
            size2,
            temperature_stride0,
            temperature_stride1,
            temperature_stride2,
            tl.float32,
            TEMPERATURE_BY_ROW,
        )
        penalty = _of_row(
            penalty_ptr,
            row,
            size1,
            size2,
            penalty_stride0,
            penalty_stride1,
            penalty_stride2,
            tl.float32,
            PENALTY_BY_ROW,
        )
        k = tl.full([], 0, tl.int64)
        if COUNTED:
            k = _of_row(
                top_k_ptr,
                row,
                size1,
                size2,
                top_k_stride0,
                top_k_stride1,
                top_k_stride2,
                tl.int64,
                TOP_K_BY_ROW,
            )
        p = tl.full([], 1.0, tl.float32)
        if WEIGHED:
            p = _of_row(
                top_p_ptr,
                row,
                size1,
                size2,
                top_p_stride0,
                top_p_stride1,
                top_p_stride2,
                tl.float32,
                TOP_P_BY_ROW,
            )
        cold = (temperature > 0.0) == 0
        # Neither 0 nor infinite: what is multiplied by it may be the other.
        rate = tl.minimum(1.4426950408889634 / tl.where(cold, 1.0, temperature), 3e38)
        rate = tl.where(rate > 0.0, rate, 1.2e-38)
        values = (x_row, seen_row, x_step, seen_step, penalty)
        top, mass = totals(values, width, rate, HAS_SEEN, DEEP, BLOCK)
        peak = tl.max(top, axis=0)
        token = tl.full([], -1, tl.int32)
        if cold:
            first = tl.full([BLOCK], NO_TOKEN, tl.int32)
            strange = tl.zeros([BLOCK], tl.int32)
            for start in range(0, width, BLOCK):
                at = start + lane
                x = penalized(values, at, at < width, HAS_SEEN)
                first = tl.minimum(first, tl.where((at < width) & (x == peak), at, NO_TOKEN))
                strange |= (x != x).to(tl.int32)
            token = tl.min(first, axis=0)
            token = tl.where((token < NO_TOKEN) & (tl.max(strange, axis=0) == 0), token, -1)
        else:
            total = tl.sum(mass, axis=0)
            if (peak < float("inf")) & (total == total):
                token = _warm(
                    values, keys, tokens, lanes, width, top, mass, peak, rate, k, p, seed, row << 32,
                    COUNTED, WEIGHED, HAS_SEEN, DEEP, BLOCK, SEARCH, STRIP,
                )  # fmt: skip
        tl.store(y_ptr + row, token.to(tl.int64))


@torch.library.custom_op("reference_kernels::sample", mutates_args=())
def _sample(
    logits: torch.Tensor,
    seed: int,
    seen: torch.Tensor | None,
    by_row: Sequence[torch.Tensor | None],
    numbers: Sequence[float],
) -> torch.Tensor:
    """``by_row`` and ``numbers`` are temperature, top_k, top_p and penalty: a tensor, or ``None`` and the number."""
    batch, vocab = logits.shape[:-1], logits.shape[-1]
    y = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if y.numel() == 0:
        return y
    # An absent input stands in by the logits, which are not read through it.
    rows = Rows.of(
        logits,
        logits if seen is None else broadcast(seen.view(torch.uint8), logits.shape),
        *(logits if value is None else broadcast(value, batch).unsqueeze(-1) for value in by_row),
    )
    x, seen_bytes, *values = rows.tensors
    whole = [float("nan") if value is not None else number for value, number in zip(by_row, numbers, strict=True)]
    counted = not (whole[1] <= 0 or whole[1] >= vocab)
    weighed = not whole[2] >= 1
    tile = config(rows.count, vocab, logits.device, counted, weighed)
    room = max(vocab, tile.search)
    size = tile.programs * (2 * room + tile.block) if counted else 1
    scratch = torch.empty(size, dtype=torch.int32, device=logits.device)
    numbers_or_values = [
        (int(number) if index == 1 else number) if value is None else values[index]
        for index, (value, number) in enumerate(zip(by_row, numbers, strict=True))
    ]
    with placed(logits.device):
        _sample_kernel[(tile.programs,)](
            y,
            scratch,
            x,
            seen_bytes,
            *numbers_or_values,
            seed,
            rows.count,
            vocab,
            room,
            *rows.sizes[1:],
            *rows.strides[0],
            *rows.strides[1],
            *(stride for strides in rows.strides[2:] for stride in strides[:3]),
            HAS_SEEN=seen is not None,
            COUNTED=counted,
            WEIGHED=weighed,
            TEMPERATURE_BY_ROW=by_row[0] is not None,
            TOP_K_BY_ROW=by_row[1] is not None,
            TOP_P_BY_ROW=by_row[2] is not None,
            PENALTY_BY_ROW=by_row[3] is not None,
            ALIGNED=vocab % 16 == 0,
            DEEP=tile.deep,
            BLOCK=tile.block,
            SEARCH=tile.search,
            STRIP=max(4, min(64, tile.block // 32)),
            num_warps=tile.warps,
        )
    return y


@_sample.register_fake
def _(logits: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)


def sample(
    logits: torch.Tensor,
    seed: int,
    temperature: torch.Tensor | float = 1.0,
    top_k: torch.Tensor | int = 0,
    top_p: torch.Tensor | float = 1.0,
    seen: torch.Tensor | None = None,
    penalty: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """A token for each row of ``logits``, ``(*batch, vocab)``, drawn from its `sampling_probabilities`: int64
    ``(*batch)``.

    ``logits`` are float32, float16 or bfloat16 with any strides, ``seen`` is bool and broadcasts to them;
    ``temperature``, ``top_p``, ``penalty`` (floats) and ``top_k`` (int32 or int64) are numbers, or tensors that
    broadcast to ``(*batch)``. The draw follows ``seed``, 0 to 2**63 - 1, the row's number and its own values. A row
    without probabilities gives -1. In tensors, whose values are not looked at before the launch, a temperature that is
    not positive counts as 0, a ``top_k`` that is not as no limit, a negative ``top_p`` as 0.

    Raises `TypeError` for other dtypes; `ValueError` for logits without a dimension or past `WIDEST`, inputs that do
    not broadcast, numbers out of range, mixed devices.
    """
    check_tensor("sample", "logits", logits, logits, FLOATS)
    if logits.ndim == 0:
        raise ValueError("sample: logits have no dimension to draw from; give them at least one")
    if logits.shape[-1] > WIDEST:
        raise ValueError(f"sample: the vocabulary has {logits.shape[-1]} tokens, supported: up to {WIDEST}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"sample: seed is {seed}, allowed: 0 to 2**63 - 1")
    if seen is not None:
        check_tensor("sample", "seen", seen, logits, (torch.bool,))
        if not broadcasts(seen.shape, logits.shape):
            raise ValueError(
                f"sample: seen of shape {tuple(seen.shape)} does not broadcast to logits {tuple(logits.shape)}"
            )
    by_row: list[torch.Tensor | None] = []
    numbers: list[float] = []
    for name, value, least, most in (
        ("temperature", temperature, 0.0, math.inf),
        ("top_k", top_k, 0, 2**53),
        ("top_p", top_p, 0.0, math.inf),
        ("penalty", penalty, math.ulp(0.0), math.inf),
    ):
        by_row.append(value if isinstance(value, torch.Tensor) else None)
        if isinstance(value, torch.Tensor):
            check_tensor("sample", name, value, logits, INTEGERS if name == "top_k" else FLOATS)
            if not broadcasts(value.shape, logits.shape[:-1]):
                raise ValueError(
                    f"sample: {name} of shape {tuple(value.shape)} does not broadcast to the batch "
                    f"{tuple(logits.shape[:-1])}; it has one number for each row"
                )
            numbers.append(0.0)
            continue
        if name == "top_k" and not isinstance(value, int):
            raise TypeError(f"sample: top_k is {value!r}, allowed: a whole number; use int(...)")
        if not (least <= value < most):
            wanted = "more than 0" if name == "penalty" else "0 or more"
            raise ValueError(f"sample: {name} is {value}, allowed: {wanted}, and finite")
        numbers.append(float(value))
    y: torch.Tensor = _sample(logits, seed, seen, by_row, numbers)
    return y
