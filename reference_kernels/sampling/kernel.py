"""Fused sampling: penalty, temperature, top-k, top-p and the draw of a token for each row, in one launch, sort-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from reference_kernels._common import (
    FLOATS,
    INTERPRETED,
    Rows,
    broadcasts,
    check_tensor,
    jit,
    placed,
    row_offset,
)
from reference_kernels._order import LOWEST, of_order_key, order_key
from reference_kernels.sampling.threshold import edge_of, search, weight

INTEGERS = (torch.int32, torch.int64)
WIDEST = 2**31 - 2**16  # token numbers are int32 in the list of candidates, and tiles go past the end


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens read at a time and candidates searched at a time, warps, and how many programs share the rows."""

    block: int
    search: int
    warps: int
    programs: int


def config(rows: int, vocab: int, device: torch.device, *, interpreted: bool = INTERPRETED) -> Tile:
    """Tile for ``rows`` rows of ``vocab`` tokens.

    8 tokens a thread and a search step of `PIVOTS` pivots by 1024 candidates, 16 results a thread, fit in the 128
    registers that 512 threads may have. The tile follows the vocabulary alone, the number of programs changes no
    result. Interpreted, tiles are small and programs take several rows, so that small cases have several of both.
    """
    if interpreted:
        block = min(256 if vocab <= 1024 else 1024, max(16, triton.next_power_of_2(vocab)))
        return Tile(block, min(block, 128), 4, max(1, min(rows, 64)))
    block = min(4096, max(128, triton.next_power_of_2(vocab)))
    on_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 132
    return Tile(block, min(block, 1024), max(1, min(16, block // 256)), max(1, min(rows, 2 * processors)))


@jit
def _penalized(
    x_row: tl.tensor,
    seen_row: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    x_step: tl.tensor,
    seen_step: tl.tensor,
    penalty: tl.tensor,
    HAS_SEEN: tl.constexpr,
) -> tl.tensor:
    """The logits at ``at`` in float32, ``-inf`` outside the row. The division is rounded as torch's, since the order
    of two nearly equal logits decides which of them stays."""
    x = tl.load(x_row + at * x_step, mask=inside, other=float("-inf")).to(tl.float32)
    if HAS_SEEN:
        seen = tl.load(seen_row + at * seen_step, mask=inside, other=0) != 0
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
    return x


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
    """A number that is the same for all rows, or lies in memory for each."""
    if BY_ROW:
        value = tl.load(number + row_offset(row, size1, size2, stride0, stride1, stride2)).to(DTYPE)
    else:
        value = tl.full([], number, DTYPE)
    return value


@jit
def _sample_kernel(
    y_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
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
    TRUNCATED: tl.constexpr,
    TEMPERATURE_BY_ROW: tl.constexpr,
    TOP_K_BY_ROW: tl.constexpr,
    TOP_P_BY_ROW: tl.constexpr,
    PENALTY_BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    """Every ``num_programs``-th row. ``keys`` and ``tokens`` hold ``room`` candidates for each program.

    With ``TRUNCATED`` a first pass over the row finds a floor below which nothing can stay, a second lists what lies
    above it, in the order of the tokens, and both cuts are searched for in that list, which mostly fits in one tile.
    """
    lane = tl.arange(0, BLOCK).to(tl.int64)
    keys = keys_ptr + tl.program_id(0).to(tl.int64) * room
    tokens = tokens_ptr + tl.program_id(0).to(tl.int64) * room
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
        cold = (temperature > 0.0) == 0
        temperature = tl.where(cold, 1.0, temperature)

        strange = tl.zeros([BLOCK], tl.int32)
        count = tl.full([], width, tl.int32)
        edge = tl.full([], LOWEST, tl.int32)
        spare = tl.full([], 0, tl.int32)
        if TRUNCATED:
            k = tl.where(
                cold,
                1,
                _of_row(
                    top_k_ptr,
                    row,
                    size1,
                    size2,
                    top_k_stride0,
                    top_k_stride1,
                    top_k_stride2,
                    tl.int64,
                    TOP_K_BY_ROW,
                ),
            )
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
            counted = (k > 0) & (k < width)
            weighed = p < 1.0
            p = tl.maximum(p, 0.0)

            top = tl.full([BLOCK], LOWEST, tl.int32)
            for start in range(0, width, BLOCK):
                inside = start + lane < width
                x = _penalized(x_row, seen_row, start + lane, inside, x_step, seen_step, penalty, HAS_SEEN)
                strange += (x != x).to(tl.int32)
                top = tl.maximum(top, tl.where(x == x, order_key(x), LOWEST))
            high = tl.max(top, axis=0)
            peak = of_order_key(high)

            floor = tl.full([], LOWEST + 1, tl.int32)
            tl.debug_barrier()  # the list of the row before has been read
            if counted:
                if k <= SEARCH:
                    # The k-th largest of maxima of disjoint parts is no larger than the k-th largest of all.
                    parts = tl.max(tl.reshape(top, [BLOCK // SEARCH, SEARCH]), axis=0)
                    tl.store(keys + tl.arange(0, SEARCH), parts)
                    tl.debug_barrier()
                    goal = k.to(tl.float32)
                    parted = tl.full([], SEARCH, tl.int32)
                    floor, end = search(keys, parted, floor, high, goal, peak, temperature, cold, False, SEARCH)
                    tl.debug_barrier()
            else:
                if weighed:
                    # What is lighter than (1 - p) / width of the peak does not add up to 1 - p of the whole, so all of
                    # it is cut; half of that leaves room for rounding.
                    depth = temperature * tl.log(0.5 * (1.0 - p) / tl.full([], width, tl.float32))
                    floor = tl.maximum(floor, order_key(peak + depth))

            count = tl.full([], 0, tl.int32)
            masses = tl.zeros([BLOCK], tl.float32)
            for start in range(0, width, BLOCK):
                inside = start + lane < width
                x = _penalized(x_row, seen_row, start + lane, inside, x_step, seen_step, penalty, HAS_SEEN)
                key = tl.where(x == x, order_key(x), LOWEST)
                listed = inside & (key >= floor)
                masses += tl.where(listed | (inside & (counted == 0)), weight(x, peak, temperature, cold), 0.0)
                more = tl.sum(listed.to(tl.int32), axis=0)
                if more > 0:
                    place = count + tl.cumsum(listed.to(tl.int32), axis=0) - 1
                    tl.store(keys + place, key, mask=listed)
                    tl.store(tokens + place, (start + lane).to(tl.int32), mask=listed)
                count += more
            tl.debug_barrier()
            mass = tl.sum(masses, axis=0)

            low = floor
            if counted & (k < count):
                goal = k.to(tl.float32)
                low, end = search(keys, count, low, high, goal, peak, temperature, cold, False, SEARCH)
                edge, above, heavier = edge_of(keys, count, low, end, peak, temperature, cold, SEARCH)
                spare = k.to(tl.int32) - above
                mass = heavier + spare.to(tl.float32) * weight(of_order_key(edge), peak, temperature, cold)
                low = edge
            if weighed:
                goal = tl.maximum(p * mass, 1e-30)
                end = high
                low, end = search(keys, count, low, end, goal, peak, temperature, cold, True, SEARCH)
                last, above, heavier = edge_of(keys, count, low, end, peak, temperature, cold, SEARCH)
                each = weight(of_order_key(last), peak, temperature, cold)
                ties = tl.minimum(tl.ceil((goal - heavier) / tl.maximum(each, 1e-37)), 2147483520.0).to(tl.int32)
                ties = tl.maximum(ties, 1)
                spare = tl.where(last == edge, tl.minimum(spare, ties), ties)
                edge = last

        # Which tile: each takes over from those before it with the chance of its share of the weight so far, which
        # draws by weight in one pass, whatever the weights still to come.
        peak = tl.full([], float("-inf"), tl.float32)
        mass = tl.full([], 0.0, tl.float32)
        ties = tl.full([], 0, tl.int32)
        chosen = tl.full([], -1, tl.int32)
        earlier = tl.full([], 0, tl.int32)
        inner = tl.full([], 0.0, tl.float32)
        for start in range(0, count, BLOCK):
            inside = start + lane < count
            if TRUNCATED:
                x = of_order_key(tl.load(keys + start + lane, mask=inside, other=LOWEST))
            else:
                x = _penalized(x_row, seen_row, start + lane, inside, x_step, seen_step, penalty, HAS_SEEN)
                strange += (x != x).to(tl.int32)
            key = order_key(x)
            tied = inside & (key == edge)
            stays = inside & ((key > edge) | (tied & (ties + tl.cumsum(tied.to(tl.int32), axis=0) <= spare)))
            before = peak
            peak = tl.maximum(peak, tl.max(tl.where(stays & (x == x), x, float("-inf")), axis=0))
            own = tl.sum(tl.where(stays, weight(x, peak, temperature, cold), 0.0), axis=0)
            mass = mass * weight(before, peak, temperature, cold) + own
            # Cold rows keep their first tile.
            share, within, _, _ = tl.rand4x(seed, (row << 32) + start // BLOCK)
            takes = (own > 0.0) & (tl.where(cold, 1.0, share) * mass <= own)
            chosen = tl.where(takes, start, chosen)
            earlier = tl.where(takes, ties, earlier)
            inner = tl.where(takes, within, inner)
            ties += tl.sum(tied.to(tl.int32), axis=0)

        # Which token of it: by the weights added up. A scan is not monotone to the last bit, so 0 is never drawn.
        first = tl.maximum(chosen, 0)
        inside = (chosen >= 0) & (first + lane < count)
        if TRUNCATED:
            x = of_order_key(tl.load(keys + first + lane, mask=inside, other=LOWEST))
        else:
            x = _penalized(x_row, seen_row, first + lane, inside, x_step, seen_step, penalty, HAS_SEEN)
        key = order_key(x)
        tied = inside & (key == edge)
        stays = inside & ((key > edge) | (tied & (earlier + tl.cumsum(tied.to(tl.int32), axis=0) <= spare)))
        weights = tl.where(stays, weight(x, peak, temperature, cold), 0.0)
        total = tl.cumsum(weights, axis=0)
        hit = (total > tl.where(cold, 0.0, inner) * tl.max(total, axis=0)) & (weights > 0.0)
        place = tl.min(tl.where(hit, lane, BLOCK), axis=0)
        place = tl.where(place < BLOCK, place, tl.max(tl.where(weights > 0.0, lane, 0), axis=0))
        token = first + place
        if TRUNCATED:
            token = tl.load(tokens + token, mask=chosen >= 0, other=-1).to(tl.int64)
        finite = (tl.max(strange, axis=0) == 0) & ((peak < float("inf")) | cold) & (chosen >= 0)
        tl.store(y_ptr + row, tl.where(finite, token, -1))


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
        logits if seen is None else seen.view(torch.uint8).broadcast_to(logits.shape),
        *(logits if value is None else value.broadcast_to(batch).unsqueeze(-1) for value in by_row),
    )
    x, seen_bytes, *values = rows.tensors
    whole = [float("nan") if value is not None else number for value, number in zip(by_row, numbers, strict=True)]
    truncated = not ((whole[1] <= 0 or whole[1] >= vocab) and whole[2] >= 1)
    tile = config(rows.count, vocab, logits.device)
    room = max(vocab, tile.search) if truncated else 1
    scratch = torch.empty((2, tile.programs, room), dtype=torch.int32, device=logits.device)
    numbers_or_values = [
        (int(number) if index == 1 else number) if value is None else values[index]
        for index, (value, number) in enumerate(zip(by_row, numbers, strict=True))
    ]
    with placed(logits.device):
        _sample_kernel[(tile.programs,)](
            y,
            scratch[0],
            scratch[1],
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
            TRUNCATED=truncated,
            TEMPERATURE_BY_ROW=by_row[0] is not None,
            TOP_K_BY_ROW=by_row[1] is not None,
            TOP_P_BY_ROW=by_row[2] is not None,
            PENALTY_BY_ROW=by_row[3] is not None,
            BLOCK=tile.block,
            SEARCH=tile.search,
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
