"""Honest kernels in the styles of attention, training and inference libraries."""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from tests.interpreter.adversarial.cases import honest
from tests.interpreter.planted.model import Memory, Pairs

INT = torch.int32


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@triton.jit
def paged_kernel(q, keys, values, table, lengths, out, scale, pages, token_stride, page_stride,
                 H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(0), tl.program_id(1)
    n = tl.load(lengths + b)
    if n == 0:
        return
    d, t = tl.arange(0, D), tl.arange(0, PAGE)
    query = tl.load(q + (b * H + h) * D + d) * scale
    m, total = float("-inf"), 0.0
    acc = tl.zeros((D,), tl.float32)
    for p in range(tl.cdiv(n, PAGE)):
        page = tl.load(table + b * pages + p).to(tl.int64)
        inside = p * PAGE + t < n
        at = page * page_stride + t[:, None] * token_stride + h * D + d[None, :]
        k = tl.load(keys + at, mask=inside[:, None], other=0.0)
        v = tl.load(values + at, mask=inside[:, None], other=0.0)
        score = tl.where(inside, tl.sum(k * query[None, :], 1), float("-inf"))
        larger = tl.maximum(m, tl.max(score))
        shrink, e = tl.exp(m - larger), tl.exp(score - larger)
        acc = acc * shrink + tl.sum(e[:, None] * v, 0)
        total = total * shrink + tl.sum(e)
        m = larger
    tl.store(out + (b * H + h) * D + d, acc / total)


@honest()
def attention_over_a_paged_cache(memory: Memory) -> Pairs:
    """Page table rows end in -1, one sequence is empty, keys and values are views of one cache."""
    heads, width, page, pages, lengths = 2, 8, 4, 4, [5, 0, 16, 1]
    cache, q = normal(2, 12, page, heads, width), normal(4, heads, width, seed=1)
    table, want, free = torch.full((4, pages), -1, dtype=INT), torch.zeros(4, heads, width), iter(range(12))
    for b, n in enumerate(lengths):
        own = [next(free) for _ in range(-(-n // page))]
        table[b, : len(own)] = torch.tensor(own, dtype=INT)
        if n:
            k, v = (cache[i, own].reshape(-1, heads, width)[:n].transpose(0, 1) for i in (0, 1))
            want[b] = F.scaled_dot_product_attention(q[b][:, None], k, v)[:, 0]
    keys, values = memory.like(cache)
    out, strides = memory.zeros(4, heads, width), (keys.stride(1), keys.stride(0))
    paged_kernel[(4, heads)](
        memory.like(q), keys, values, memory.like(table), memory.like(torch.tensor(lengths, dtype=INT)), out,
        width**-0.5, pages, *strides, H=heads, D=width, PAGE=page,
    )  # fmt: skip
    return [(out, want)]


@triton.jit
def varlen_kernel(q, k, v, starts, out, scale, D: tl.constexpr, B: tl.constexpr, CAUSAL: tl.constexpr):
    block, sequence = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + sequence)
    n = tl.load(starts + sequence + 1) - start
    if block * B >= n:
        return
    d, r = tl.arange(0, D), block * B + tl.arange(0, B)
    query = tl.load(q + (start + r)[:, None] * D + d[None, :], mask=(r < n)[:, None], other=0.0)
    m, total = tl.full((B,), float("-inf"), tl.float32), tl.zeros((B,), tl.float32)
    acc = tl.zeros((B, D), tl.float32)
    stop = tl.minimum((block + 1) * B, n) if CAUSAL else n
    for first in range(0, stop, B):
        c = first + tl.arange(0, B)
        key = tl.load(k + (start + c)[None, :] * D + d[:, None], mask=(c < n)[None, :], other=0.0)
        keep = (c < n)[None, :]
        if CAUSAL:
            keep &= r[:, None] >= c[None, :]
        score = tl.where(keep, tl.dot(query, key) * scale, float("-inf"))
        larger = tl.maximum(m, tl.max(score, 1))
        shrink, e = tl.exp(m - larger), tl.exp(score - larger[:, None])
        value = tl.load(v + (start + c)[:, None] * D + d[None, :], mask=(c < n)[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(e, value)
        total = total * shrink + tl.sum(e, 1)
        m = larger
    tl.store(out + (start + r)[:, None] * D + d[None, :], acc / total[:, None], mask=(r < n)[:, None])


@honest()
def attention_over_packed_sequences(memory: Memory) -> Pairs:
    starts = [0, 3, 3, 23, 39]
    qkv, pairs = memory.like(normal(3, 39, 16)), []
    offsets = memory.like(torch.tensor(starts, dtype=INT))
    for causal in (False, True):
        out = torch.empty(39, 16)
        varlen_kernel[(2, 4)](*qkv, offsets, out, 0.25, D=16, B=16, CAUSAL=causal)
        parts = [qkv[:, a:b] for a, b in pairwise(starts) if b > a]
        want = [F.scaled_dot_product_attention(*(x[None] for x in part), is_causal=causal)[0] for part in parts]
        pairs.append((out, torch.cat(want)))
    return pairs


@triton.jit
def recurrence(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2


@triton.jit
def chunk_kernel(a, b, state, out, T, CHUNK: tl.constexpr):
    channel = tl.program_id(0)
    h = tl.load(state + channel)
    for first in range(0, T, CHUNK):
        t = first + tl.arange(0, CHUNK)
        decay = tl.load(a + channel * T + t, mask=t < T, other=1.0)
        given = tl.load(b + channel * T + t, mask=t < T, other=0.0)
        products, sums = tl.associative_scan((decay, given), 0, recurrence)
        y = products * h + sums
        tl.store(out + channel * T + t, y, mask=t < T)
        h = tl.sum(tl.where(t == tl.minimum(first + CHUNK, T) - 1, y, 0.0))
    tl.store(state + channel, h)


@honest()
def state_space_scan_by_chunks(memory: Memory) -> Pairs:
    """The state is read at the start and written at the end, by the same program."""
    a, b, state = memory.like(normal(3, 21).sigmoid()), memory.like(normal(3, 21, seed=1)), memory.like(normal(3))
    out, h, want = memory.zeros(3, 21), state.clone(), []
    for t in range(21):
        h = a[:, t] * h + b[:, t]
        want.append(h)
    chunk_kernel[(3,)](a, b, state, out, 21, CHUNK=8)
    return [(out, torch.stack(want, 1)), (state, h)]


@triton.jit
def cross_entropy_kernel(logits, targets, losses, rows, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    if target == -100:
        for first in range(0, V, BLOCK):
            i = first + tl.arange(0, BLOCK)
            tl.store(logits + i, 0.0, mask=i < V)
        return
    m, total = float("-inf"), 0.0
    wanted = tl.load(logits + target)
    for first in range(0, V, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(logits + i, mask=i < V, other=float("-inf"))
        larger = tl.maximum(m, tl.max(x))
        total = total * tl.exp(m - larger) + tl.sum(tl.exp(x - larger))
        m = larger
    for first in range(0, V, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.exp(tl.load(logits + i, mask=i < V, other=float("-inf")) - m) / total
        tl.store(logits + i, tl.where(i == target, x - 1, x) / rows, mask=i < V)
    tl.store(losses + row, m + tl.log(total) - wanted)


@honest()
def cross_entropy_with_its_gradient_in_place(memory: Memory) -> Pairs:
    x, targets = normal(5, 37), torch.tensor([3, -100, 0, 36, 7])
    known = x.clone().requires_grad_()
    want = F.cross_entropy(known, targets, reduction="none")
    (want.sum() / 5).backward()
    logits, losses = memory.like(x), torch.zeros(5)
    cross_entropy_kernel[(5,)](logits, memory.like(targets), losses, 5, 37, BLOCK=16)
    assert known.grad is not None
    return [(losses, want.detach()), (logits, known.grad)]


@triton.jit
def table_kernel(parameters, gradients, sizes, rate, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    p = tl.load(parameters + t).to(tl.pointer_type(tl.float32))
    g = tl.load(gradients + t).to(tl.pointer_type(tl.float32))
    n = tl.load(sizes + t)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        value = tl.load(p + i, mask=i < n) - rate * tl.load(g + i, mask=i < n)
        tl.store(p + i, value, mask=i < n)


@honest()
def optimiser_over_a_table_of_pointers(memory: Memory) -> Pairs:
    sizes = torch.tensor([5, 20, 33], dtype=INT)
    parameters, gradients = ([torch.full((n,), fill) for n in sizes.tolist()] for fill in (1.0, 2.0))
    tables = [memory.like(torch.tensor([t.data_ptr() for t in many])) for many in (parameters, gradients)]
    table_kernel[(3,)](*tables, memory.like(sizes), 0.25, BLOCK=8)
    return [(p, torch.full_like(p, 0.5)) for p in parameters]


@triton.jit
def swap_kernel(x, N: tl.constexpr):
    a, b = tl.program_id(0), tl.program_id(1)
    if a <= b:
        i, j = a * N + tl.arange(0, N), b * N + tl.arange(0, N)
        width = tl.num_programs(0) * N
        upper, lower = x + i[:, None] * width + j[None, :], x + j[:, None] * width + i[None, :]
        u, v = tl.load(upper), tl.load(lower)
        tl.store(upper, tl.trans(v))
        tl.store(lower, tl.trans(u))


@honest()
def transpose_in_place(memory: Memory) -> Pairs:
    x = memory.range(12, 12)
    want = x.T.clone()
    swap_kernel[(3, 3)](x, N=4)
    return [(x, want)]


@triton.jit
def quantise_kernel(x, out, scales, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    scale = tl.max(tl.abs(v)) / 448.0
    tl.store(scales + pid, scale)
    tl.store(out + i, (v / scale).to(out.dtype.element_ty), mask=i < n)


@honest()
def quantised_by_blocks_through_a_reinterpreted_pointer(memory: Memory) -> Pairs:
    x, scales, raw = memory.range(20), torch.empty(3), torch.empty(20, dtype=torch.uint8)
    quantise_kernel[(3,)](x, triton.reinterpret(raw, tl.float8e4nv), scales, 20, BLOCK=8)
    want = torch.stack([part.abs().max() for part in x.split(8)]) / 448
    rounded = (x / want.repeat_interleave(8)[:20]).to(torch.float8_e4m3fn)
    return [(scales, want), (raw.view(torch.float8_e4m3fn).float(), rounded.float())]


def zero_first(arguments: dict[str, torch.Tensor]) -> None:
    """The pre-hook of a config."""
    arguments["out"].zero_()


@triton.autotune(
    configs=[triton.Config({"BLOCK": 8}), triton.Config({"BLOCK": 16}, pre_hook=zero_first)],
    key=["n"],
    reset_to_zero=["out"],
)
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
@triton.jit
def resetting_kernel(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i) if EVEN else tl.load(x + i, mask=i < n, other=0.0)
    tl.atomic_add(out, tl.sum(v))


@honest()
def autotuned_sum_into_a_tensor_reset_to_zero(memory: Memory) -> Pairs:
    x, out = memory.range(24), torch.empty(1).zero_()
    resetting_kernel[lambda a: (triton.cdiv(a["n"], a["BLOCK"]),)](x, out, 24)
    return [(out, x.sum(0, keepdim=True))]
