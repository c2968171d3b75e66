"""The attention kernels of the reference suite at sizes, and on streams and graphs, that only a GPU has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.decode_attention import decode_attention, decode_attention_reference
from reference_kernels.flash_attention import flash_attention, flash_attention_reference

pytestmark = [
    pytest.mark.gpu,
    # Where the reference's backward pass has the first product of a process.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UNITS = {torch.float32: 2.0**-18, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def _inputs(*batch: int, queries: int, keys: int, features: int, dtype: torch.dtype, kv_heads: int = 2) -> list[Any]:
    shapes = ((queries, 2 * kv_heads), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(*batch, *shape, features, device="cuda").to(dtype).requires_grad_() for shape in shapes]


def _close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Within some units of the dtype of the largest element."""
    got, wanted = got.detach(), wanted.detach()
    assert float((got.double() - wanted).abs().max()) <= UNITS[dtype] * float(wanted.abs().max()) + 1e-9


def _compared(inputs: list[Any], dtype: torch.dtype, **options: Any) -> None:
    exact = [each.detach().double().requires_grad_() for each in inputs]
    wanted = flash_attention_reference(*exact, **options, compute=torch.float64)
    got = flash_attention(*inputs, **options)
    dout = torch.randn_like(wanted[0]).to(dtype)
    dlse = torch.randn_like(wanted[1]).float().masked_fill(wanted[1].isneginf(), 0.0)

    _close(got[0], wanted[0], dtype)
    assert torch.equal(got[1].isneginf(), wanted[1].isneginf())
    _close(got[1].nan_to_num(neginf=0.0), wanted[1].nan_to_num(neginf=0.0), torch.float32)
    right = torch.autograd.grad(wanted, exact, (dout.double(), dlse.double()))
    found = torch.autograd.grad(got, inputs, (dout, dlse), retain_graph=True)
    for mine, theirs in zip(found, right, strict=True):
        _close(mine, theirs, dtype)
    again = torch.autograd.grad(got, inputs, (dout, dlse))
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [64, 96, 128, 256])
def test_heads_of_a_model(features: int, dtype: torch.dtype) -> None:
    """Results, log-sum-exps and gradients over many tiles are those of float64; gradients have the same bits again."""
    _compared(_inputs(2, queries=777, keys=777, features=features, dtype=dtype), dtype, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [17, 32, 64])
@pytest.mark.parametrize("turned", [(0,), (1,), (2,), (0, 1, 2)])
def test_features_that_lie_apart(turned: tuple[int, ...], features: int, dtype: torch.dtype) -> None:
    """Queries, keys or values whose innermost dimension in memory is another: the tiles of each layout are compiled
    anew, and some of them wrongly by Triton 3.6.0."""
    inputs = _inputs(3, queries=50, keys=200, features=features, dtype=dtype)
    for each in turned:
        inputs[each] = inputs[each].detach().transpose(0, 3).contiguous().transpose(0, 3).requires_grad_()
    _compared(inputs, dtype, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 200}, {"causal": True, "window": 200}, {"causal": True}])
@pytest.mark.parametrize(("queries", "keys"), [(1, 900), (300, 900), (900, 300)])
def test_every_mask(queries: int, keys: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Full, causal and windowed, with fewer and more queries than keys."""
    _compared(_inputs(1, queries=queries, keys=keys, features=128, dtype=dtype), dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences_of_a_batch(dtype: torch.dtype) -> None:
    """Sequences of no, one and a thousand rows, in one launch."""
    lengths = torch.tensor([0, 1, 1000, 128, 129, 0, 333], device="cuda")
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
    total = int(offsets[-1])
    inputs = _inputs(queries=total, keys=total, features=128, dtype=dtype)
    for window in (None, 100):
        _compared(inputs, dtype, causal=True, offsets=offsets, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_first", [True, False])
def test_rows_of_any_layout(heads_first: bool, dtype: torch.dtype) -> None:
    """Heads before tokens, which the copy engine reads as well, and rows of an odd step, which it cannot."""
    given = [each.detach() for each in _inputs(2, queries=300, keys=333, features=128, dtype=dtype)]
    if heads_first:
        given = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in given]
    else:
        given = [F.pad(each, (0, 1))[..., :-1] for each in given]
    _compared([each.requires_grad_() for each in given], dtype, causal=True)


def test_torch_agrees_in_half_precision() -> None:
    """Against torch's own attention at a size of a model, in bfloat16."""
    q, k, v = (each.detach() for each in _inputs(2, queries=4096, keys=4096, features=128, dtype=torch.bfloat16))
    wanted = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(flash_attention(q, k, v, causal=True)[0], wanted.transpose(1, 2), rtol=2e-2, atol=2e-2)


def test_the_last_rows_past_31_bits() -> None:
    """A batch whose elements pass 2**31 gives its last sequence the bits that it has alone."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    q, k, v = (torch.randn(2100, 1024, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 1, 1))

    out, lse = flash_attention(q, k, v, causal=True)

    alone, sums = flash_attention(q[-1:].clone(), k[-1:].clone(), v[-1:].clone(), causal=True)
    assert torch.equal(out[-1:], alone)
    assert torch.equal(lse[-1:], sums)


def _cache(batch: int, capacity: int, dtype: torch.dtype, *, group: int = 8, features: int = 128) -> dict[str, Any]:
    shape = (batch, capacity, 4, features)
    return {
        "q": torch.randn(batch, 4 * group, features, device="cuda").to(dtype),
        "k_cache": torch.randn(shape, device="cuda").to(dtype),
        "v_cache": torch.randn(shape, device="cuda").to(dtype),
        "lengths": torch.randint(0, capacity + 1, (batch,), device="cuda", dtype=torch.int32),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "capacity", "window"), [(7, 300, None), (7, 3000, None), (2, 40000, 5000)])
@pytest.mark.parametrize(("group", "features"), [(8, 128), (1, 64), (20, 256)])
def test_decoding(group: int, features: int, batch: int, capacity: int, window: int | None, dtype: torch.dtype) -> None:
    """One chunk, several, and those that a window begins in, for groups that fill a tile and others."""
    given = _cache(batch, capacity, dtype, group=group, features=features)
    wanted = decode_attention_reference(**given, window=window, compute=torch.float64)

    out, lse = decode_attention(**given, window=window)

    _close(out, wanted[0], dtype)
    assert torch.equal(lse.isneginf(), wanted[1].isneginf())
    _close(lse.nan_to_num(neginf=0.0), wanted[1].nan_to_num(neginf=0.0), torch.float32)


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 16, 48, 256])
def test_decoding_from_pages(size: int, cache: torch.dtype) -> None:
    """Pages give the bits of the contiguous cache, float8 included; numbers of no page past the end are left alone."""
    given = _cache(5, 1536, torch.bfloat16)
    for name in ("k_cache", "v_cache"):
        given[name] = given[name].to(cache)
    wanted = decode_attention(**given)
    table = torch.randperm(5 * 1536 // size, device="cuda").view(5, -1)
    for name in ("k_cache", "v_cache"):
        pages = torch.empty(table.numel(), size, 4, 128, device="cuda", dtype=cache)
        pages.view(torch.uint8)[table.flatten()] = (
            given[name].view(torch.uint8).view(-1, *pages.view(torch.uint8).shape[1:])
        )
        given[name] = pages
    used = torch.arange(table.shape[1], device="cuda") * size < given["lengths"][:, None]

    got = decode_attention(**given, page_table=torch.where(used, table, -1))

    assert all(map(torch.equal, got, wanted))


def test_pages_past_31_bits() -> None:
    """A page whose first element lies past 2**31 is read where it is."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    pages = 2**31 // (16 * 8 * 128) + 9
    k_cache, v_cache = (torch.zeros(pages, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for cache in (k_cache, v_cache):
        cache[-3:] = torch.randn(3, 16, 8, 128, device="cuda")
    q = torch.randn(1, 8, 128, device="cuda", dtype=torch.bfloat16)
    lengths, table = torch.tensor([45], device="cuda"), torch.tensor([[pages - 1, pages - 3, pages - 2]], device="cuda")

    got = decode_attention(q, k_cache, v_cache, lengths, table)

    wanted = decode_attention(q, k_cache[-3:].clone(), v_cache[-3:].clone(), lengths, table - (pages - 3))
    assert all(map(torch.equal, got, wanted))


def test_unchecked_calls_are_captured_and_replayed() -> None:
    """Without checks both kernels run in a CUDA graph, which follows lengths that change."""
    given = _cache(4, 2048, torch.bfloat16)
    q, k, v = (each.detach() for each in _inputs(queries=500, keys=500, features=128, dtype=torch.bfloat16))
    offsets = torch.tensor([0, 100, 500], device="cuda", dtype=torch.int32)

    def call() -> tuple[torch.Tensor, ...]:
        packed = flash_attention(q, k, v, causal=True, offsets=offsets, checked=False)
        return (*decode_attention(**given, checked=False), *packed)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    given["lengths"].copy_(torch.tensor([0, 1, 2048, 700]))
    offsets.copy_(torch.tensor([0, 333, 500]))
    graph.replay()

    assert all(map(torch.equal, got, call()))


def test_checks_refuse_on_the_device() -> None:
    """Numbers out of range on the device are refused before the launch, and the device works on."""
    given = _cache(4, 100, torch.bfloat16)
    with pytest.raises(ValueError, match=r"lengths\[2\] is 101, allowed: 0 to 100"):
        decode_attention(**{**given, "lengths": torch.tensor([0, 5, 101, 3], device="cuda")})
    q, k, v = (each.detach() for each in _inputs(queries=50, keys=50, features=64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="run from 0 to 51"):
        flash_attention(q, k, v, offsets=torch.tensor([0, 51], device="cuda"))
    torch.cuda.synchronize()


def test_checks_cannot_be_captured() -> None:
    """Inside a capture the checks say what to do instead of breaking it."""
    given = _cache(2, 100, torch.bfloat16)
    decode_attention(**given)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        given["q"].clone()  # torch warns of a graph of nothing
        with pytest.raises(RuntimeError, match="pass checked=False"):
            decode_attention(**given)


def test_keys_that_no_query_meets_have_no_gradient() -> None:
    """Blocks whose loop is empty must not bring tiles: of 320 such blocks one or two held pieces of the gradient."""
    inputs = _inputs(1, queries=1, keys=20_585, features=16, dtype=torch.float16, kv_heads=1)
    wrong = []
    for _ in range(100):
        out, _ = flash_attention(*inputs, window=7)
        _, dk, dv = torch.autograd.grad(out, inputs, torch.randn_like(out))
        wrong += [int(each[:, :-7].count_nonzero()) for each in (dk, dv)]
    assert not any(wrong), wrong
