"""The attention kernel beyond its specs: a second source of the reference, masks, packed sequences, what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.flash_attention import flash_attention, flash_attention_reference
from reference_kernels.flash_attention.backward import config_keys, config_queries
from reference_kernels.flash_attention.call import Call, engine
from reference_kernels.flash_attention.kernel import _flash_attention, config
from tests.sweeps import sweep

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _inputs(
    *batch: int, queries: int, keys: int, heads: int = 4, kv_heads: int = 2, features: int = 16, seed: int = 3
) -> Three:
    """In float64, of float32's values."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    q, k, v = (torch.randn((*batch, *shape, features), generator=generator).double() for shape in shapes)
    return q, k, v


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, seen: torch.Tensor | None, scale: float | None = None
) -> Any:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True).transpose(1, 2)


def _seen(queries: int, keys: int, causal: bool, window: int | None) -> torch.Tensor:
    """By the words of the reference, pair by pair."""
    rows = []
    for i in range(queries):
        at = i + keys - queries
        rows.append([(j <= at or not causal) and (window is None or abs(at - j) < window) for j in range(keys)])
    return torch.tensor(rows).reshape(queries, keys)


MASKS = list(itertools.product((False, True), (None, 1, 5)))


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (3, 11)])
def test_the_reference_is_sdpa(queries: int, keys: int, causal: bool, window: int | None) -> None:
    """In float64 the reference and its gradients are those of ``scaled_dot_product_attention`` under the same mask."""
    inputs: list[Any] = [each.requires_grad_() for each in _inputs(2, queries=queries, keys=keys)]
    seen = _seen(queries, keys, causal, window)
    wanted = _sdpa(*inputs, seen=seen, scale=0.3)
    upstream = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    got, lse = flash_attention_reference(*inputs, causal=causal, window=window, scale=0.3, compute=torch.float64)

    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs[0], inputs[1].repeat_interleave(2, 2)) * 0.3
    torch.testing.assert_close(lse, scores.masked_fill(~seen, -torch.inf).logsumexp(-1), rtol=1e-12, atol=1e-14)
    for mine, theirs in zip(*(torch.autograd.grad(each, inputs, upstream) for each in (got, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def test_equal_lengths_are_causal_as_sdpa_has_it() -> None:
    """Without a mask, and with ``is_causal`` for as many queries as keys, torch means the same."""
    q, k, v = _inputs(2, queries=7, keys=7)
    queries, keys, values = (each.transpose(1, 2) for each in (q, k, v))
    for causal in (False, True):
        wanted = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)
        got = flash_attention_reference(q, k, v, causal=causal, compute=torch.float64)[0]
        torch.testing.assert_close(got.transpose(1, 2), wanted)


def test_packed_sequences_are_those_alone() -> None:
    """The packed reference is the plain one of each sequence by itself."""
    q, k, v = _inputs(queries=20, keys=31)
    offsets, k_offsets = torch.tensor([0, 5, 5, 20]), torch.tensor([0, 4, 20, 31])

    options: dict[str, Any] = {"causal": True, "window": 4, "compute": torch.float64}

    got, lse = flash_attention_reference(q, k, v, offsets=offsets, k_offsets=k_offsets, **options)

    for (a, b), (c, d) in zip(
        itertools.pairwise(offsets.tolist()), itertools.pairwise(k_offsets.tolist()), strict=True
    ):
        alone, sums = flash_attention_reference(q[None, a:b], k[None, c:d], v[None, c:d], **options)
        assert torch.equal(got[a:b], alone[0])
        assert torch.equal(lse[:, a:b], sums[0])


def _compared(inputs: Three, seed: int = 7, **options: Any) -> None:
    """The kernel and its gradients, by both results, against the reference in float64."""
    exact = [each.clone().requires_grad_() for each in inputs]
    given = [each.float().requires_grad_() for each in inputs]
    wanted = flash_attention_reference(*exact, **options, compute=torch.float64)
    got = flash_attention(*given, **options)
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(wanted[0].shape, generator=generator)
    dlse = torch.randn(wanted[1].shape, generator=generator)

    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-5, atol=1e-6)
    right = torch.autograd.grad(wanted, exact, (dout.double(), dlse.double()))
    for mine, theirs in zip(torch.autograd.grad(got, given, (dout, dlse)), right, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 20), (False, 33)])
@pytest.mark.parametrize(("queries", "keys"), [(70, 70), (33, 90), (70, 40)])
def test_several_tiles_each_way(queries: int, keys: int, causal: bool, window: int | None) -> None:
    """Tiles below, on and above the diagonal, and those that a window begins or ends in."""
    _compared(_inputs(1, queries=queries, keys=keys, heads=3, kv_heads=1, features=24), causal=causal, window=window)


@sweep("options", [{"causal": True}, {"causal": True, "window": 17}, {"window": 17}])
def test_every_alignment_of_mask_and_tiles(options: dict[str, Any]) -> None:
    """A mask may begin and end anywhere in a tile: at its first position, at its last, between two."""
    for shift in range(-16, 17):
        _compared(_inputs(1, queries=50, keys=50 + shift, heads=1, kv_heads=1), **options)


@pytest.mark.parametrize("features", [1, 16, 96, 256])
def test_heads_of_any_size(features: int) -> None:
    """A head that fills no tile, one that fills it, and the widest."""
    _compared(_inputs(1, queries=20, keys=37, features=features), causal=True)


def test_many_packed_sequences() -> None:
    """More sequences than are searched at once, of no, one and several tiles, some without keys."""
    generator = torch.Generator().manual_seed(11)
    lengths, k_lengths = (torch.randint(0, 4, (150,), generator=generator) for _ in range(2))
    lengths[77], k_lengths[77], k_lengths[3], lengths[3] = 40, 50, 0, 3
    offsets, k_offsets = (F.pad(each.cumsum(0), (1, 0)) for each in (lengths, k_lengths))
    inputs = _inputs(queries=int(offsets[-1]), keys=int(k_offsets[-1]), heads=2, kv_heads=1)

    _compared(inputs, causal=True, offsets=offsets, k_offsets=k_offsets.int())


def test_a_query_that_sees_no_key() -> None:
    """Its result is 0, its log-sum-exp minus infinity, its gradient 0, and it adds nothing to those of keys."""
    inputs = [each.float().requires_grad_() for each in _inputs(1, queries=40, keys=3)]

    out, lse = flash_attention(*inputs, causal=True)
    dq, dk, dv = torch.autograd.grad(out.square().sum() + lse[:, :, 37:].sum(), inputs)
    few = [inputs[0].detach()[:, 37:].requires_grad_(), *(each.detach().requires_grad_() for each in inputs[1:])]
    alone, sums = flash_attention(*few, causal=True)
    gradients = torch.autograd.grad(alone.square().sum() + sums.sum(), few)

    assert bool((out[:, :37] == 0).all())
    assert bool(lse[:, :, :37].isneginf().all())
    assert bool((dq[:, :37] == 0).all())
    for mine, theirs in zip((dq[:, 37:], dk, dv), gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_no_keys_at_all() -> None:
    """The result is 0 for every query, the log-sum-exp minus infinity, and gradients are 0 or empty."""
    inputs = [each.float().requires_grad_() for each in _inputs(2, queries=3, keys=0)]

    out, lse = flash_attention(*inputs)

    assert bool((out == 0).all())
    assert bool(lse.isneginf().all())
    dq, dk, _ = torch.autograd.grad(out.sum(), inputs)
    assert bool((dq == 0).all())
    assert dk.shape == (2, 0, 2, 16)


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads", "kv_heads"), [(0, 3, 4, 2, 1), (1, 0, 4, 2, 1), (1, 3, 4, 0, 2)]
)
def test_sizes_of_zero(batch: int, queries: int, keys: int, heads: int, kv_heads: int) -> None:
    """No batch, no queries or no heads give empty results, and gradients of 0 by what has elements."""
    raw = _inputs(batch, queries=queries, keys=keys, heads=heads, kv_heads=kv_heads)
    inputs = [each.float().requires_grad_() for each in raw]

    out, lse = flash_attention(*inputs, causal=True)

    assert (out.shape, lse.shape) == ((batch, queries, heads, 16), (batch, heads, queries))
    for gradient, each in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert torch.equal(gradient, torch.zeros_like(each))


def test_nan_stays_with_its_query_and_reaches_those_that_see_it() -> None:
    """NaN in a query makes that row NaN alone; in a key, the queries from there on under a causal mask."""
    q, k, v = (each.float() for each in _inputs(1, queries=40, keys=40))
    broken = q.clone()
    broken[0, 21, 1, 0] = torch.nan
    rows = flash_attention(broken, k, v, causal=True)[0].isnan().any(-1)
    assert rows.nonzero().tolist() == [[0, 21, 1]]

    broken = k.clone()
    broken[0, 21, 1, 0] = torch.nan
    rows = flash_attention(q, broken, v, causal=True)[0].isnan().any(-1)
    assert bool(rows[0, 21:, 2:].all())
    assert not bool(rows[0, :21].any())
    assert not bool(rows[0, :, :2].any())


def test_logits_far_apart() -> None:
    """Scores beyond the range of exp give weights of 1 and 0, and finite gradients."""
    q, k, v = (each.float() * 1e4 for each in _inputs(1, queries=5, keys=20))
    inputs = [each.requires_grad_() for each in (q, k, v)]

    out, lse = flash_attention(*inputs)

    torch.testing.assert_close(out, flash_attention_reference(*inputs)[0])
    assert all(bool(each.isfinite().all()) for each in (lse, *torch.autograd.grad(out.sum(), inputs)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sharp_weight_has_an_accurate_gradient(dtype: torch.dtype) -> None:
    """Where one weight is near 1, the gradient by the query is off by its own rounding, not by that of the result to 16
    bits, which is a hundred times as much."""
    q, k, v = (torch.zeros(1, n, 1, 64, dtype=dtype) for n in (1, 2, 2))
    q[0, 0, 0, 0], k[0, 0, 0, 0] = 2.0, 27.0  # scores 6.75 and 0: the other weight is 0.001
    v[:] = torch.randn(v.shape, generator=torch.Generator().manual_seed(0)).mul(30).to(dtype)
    dout = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = q.double().requires_grad_()
    wanted = flash_attention_reference(exact, k.double(), v.double(), compute=torch.float64)[0]
    (right,) = torch.autograd.grad(wanted, exact, dout.double())

    (dq,) = torch.autograd.grad(flash_attention(q.requires_grad_(), k, v)[0], q, dout)

    size = float((dout.double().abs() * v[:, :1].double().abs()).sum()) * 27 / 8
    assert float((dq.double() - right).abs().max()) < size * torch.finfo(dtype).eps * 2**-7


def test_unasked_gradients_cost_nothing() -> None:
    """Each subset of inputs that require grad gets the gradients that it gets among all."""
    raw = _inputs(1, queries=20, keys=20)
    every = [each.float().requires_grad_() for each in raw]
    whole = torch.autograd.grad(flash_attention(*every, causal=True)[0].square().sum(), every)
    for asked in itertools.product((False, True), repeat=3):
        if not any(asked):
            continue
        inputs = [each.float().requires_grad_(wanted) for each, wanted in zip(raw, asked, strict=True)]
        loss = flash_attention(*inputs, causal=True)[0].square().sum()
        found = torch.autograd.grad(loss, [each for each in inputs if each.requires_grad])
        assert all(map(torch.equal, found, (w for w, wanted in zip(whole, asked, strict=True) if wanted)))


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernels, autograd registration and tracing hold, strided, packed and empty inputs included."""
    q, k, v = (each.half().transpose(1, 2).contiguous().transpose(1, 2) for each in _inputs(1, queries=5, keys=7))
    offsets = torch.tensor([0, 3, 5])
    flat = q[0].requires_grad_(), k[0, :5], v[0, :5]
    torch.library.opcheck(_flash_attention, (*flat, offsets, None, True, 3, 0.25, True, True))
    torch.library.opcheck(_flash_attention, (q, k.requires_grad_(), v, None, None, False, None, 0.25, False, True))
    torch.library.opcheck(_flash_attention, (q[:, :0], k, v, None, None, False, None, 0.25, False, False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_graph(dtype: torch.dtype) -> None:
    """The kernel and its gradients compile without a graph break, checked offsets included."""
    inputs = [each.to(dtype).requires_grad_() for each in _inputs(queries=20, keys=20)]
    offsets = torch.tensor([0, 3, 20])

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flash_attention(q, k, v, causal=True, offsets=offsets)

    whole, plain = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs), call(*inputs)

    torch.testing.assert_close(whole, plain, rtol=0, atol=0)
    got, wanted = (torch.autograd.grad(out.square().sum() + lse.sum(), inputs) for out, lse in (whole, plain))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_second_derivative_is_refused() -> None:
    """The backward kernels have no gradient of their own, and say so instead of leaving a term out."""
    inputs = [each.float().requires_grad_() for each in _inputs(1, queries=4, keys=4)]
    (first,) = torch.autograd.grad(flash_attention(*inputs)[0].square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(first.sum(), inputs[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 20)])
def test_how_rows_are_read_changes_no_bit(causal: bool, window: int | None, dtype: torch.dtype) -> None:
    """Rows that the copy engine cannot read, and those of packed sequences, take the same way through the same tiles:
    results and gradients have the bits of rows that it reads."""
    given = [each.to(dtype) for each in _inputs(2, queries=70, keys=83, features=24)]
    apart = [F.pad(each, (0, 1))[..., :-1] for each in given]
    found: list[list[torch.Tensor]] = []

    for inputs in (given, apart):
        assert engine(Call.of(inputs, None, None, causal, window, 1.0), *inputs) is (inputs is given)
        leaves = [each.detach().requires_grad_() for each in inputs]
        out, lse = flash_attention(*leaves, causal=causal, window=window)
        found.append([out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))])

    assert all(map(torch.equal, *found))


def test_what_the_copy_engine_reads() -> None:
    """16-byte steps from a 16-byte address, features without gaps, 16 bits each; of sequences that are not packed."""
    x = torch.zeros(3, 9, 4, 24, dtype=torch.float16)
    flat = torch.zeros(x.numel() + 1, dtype=torch.float16)
    told = {
        "whole": (x, True),
        "head of a wider row": (torch.zeros(3, 9, 4, 32, dtype=torch.float16)[..., :24], True),
        "heads first": (x.transpose(1, 2), True),
        "float32": (x.float(), False),
        "odd address": (flat[1:].view(x.shape), False),
        "odd row": (torch.zeros(3, 9, 4, 25, dtype=torch.float16)[..., :24], False),
        "gaps": (torch.zeros(3, 9, 4, 48, dtype=torch.float16)[..., ::2], False),
        "expanded": (x[:1].expand(3, -1, -1, -1), False),
    }
    for name, (each, wanted) in told.items():
        call = Call.of((each, each, each), None, None, False, None, 1.0)
        assert engine(call, each) is wanted, name
    offsets = torch.tensor([0, 9])
    packed = Call.of((x[0], x[0], x[0]), offsets, None, False, None, 1.0)
    assert not engine(packed, packed.k, packed.v)


@pytest.mark.parametrize("dtype", FLOATS)
def test_tiles_are_powers_of_two(dtype: torch.dtype) -> None:
    """Every tile that a GPU gets is one that ``tl.dot`` takes."""
    for features, choose in itertools.product((1, 64, 65, 128, 129, 256), (config, config_queries, config_keys)):
        tile = choose(features, dtype, interpreted=False)
        for size in (tile.queries, tile.keys, tile.warps):
            assert size & (size - 1) == 0
        assert min(tile.queries, tile.keys) >= 16


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (TypeError, "q is float64, allowed: float32", lambda a: {"q": a["q"].double()}),
        (TypeError, "k is float16, allowed: float32", lambda a: {"k": a["k"].half()}),
        (
            ValueError,
            r"allowed: \(batch, tokens, heads, features\). Packed sequences need offsets",
            lambda a: {"q": a["q"][0]},
        ),
        (ValueError, "v .1, 3, 2, 16. do not fit", lambda a: {"v": a["v"][:, :3]}),
        (ValueError, "q .1, 6, 4, 8., .* do not fit", lambda a: {"q": a["q"][..., :8]}),
        (ValueError, "q .3, 6, 4, 16., .* do not fit", lambda a: {"q": a["q"].expand(3, 6, 4, 16)}),
        (ValueError, "q has 3 heads, k and v have 2", lambda a: {"q": a["q"][:, :, :3]}),
        (ValueError, "300 features, supported: 1 to 256", lambda a: {n: torch.ones(1, 2, 2, 300) for n in "qkv"}),
        (ValueError, "0 features", lambda a: {n: a[n][..., :0] for n in "qkv"}),
        (ValueError, "window is 0", lambda a: {"window": 0}),
        (ValueError, "scale is -1.0", lambda a: {"scale": -1.0}),
        (ValueError, "scale is nan", lambda a: {"scale": float("nan")}),
        (ValueError, "k_offsets without offsets", lambda a: {"k_offsets": torch.tensor([0, 6])}),
    ],
)
def test_what_is_refused(
    error: type[Exception], words: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """What the kernel does not support is refused in words, before anything is launched."""
    given = dict(zip("qkv", (each.float() for each in _inputs(1, queries=6, keys=6)), strict=True))
    with pytest.raises(error, match=words):
        flash_attention(**{**given, **change(given)})


@pytest.mark.parametrize(
    ("error", "words", "offsets", "k_offsets"),
    [
        (TypeError, "offsets is float32, allowed: int32, int64", torch.tensor([0.0, 6.0]), None),
        (ValueError, r"offsets has shape \(1, 2\)", torch.tensor([[0, 6]]), None),
        (ValueError, r"offsets has shape \(0,\)", torch.tensor([], dtype=torch.int32), None),
        (ValueError, r"k_offsets has shape \(2,\).*offsets have 3", torch.tensor([0, 1, 6]), torch.tensor([0, 9])),
        (ValueError, "offsets run from 1 to 6, allowed: from 0 to 6", torch.tensor([1, 6]), torch.tensor([0, 9])),
        (ValueError, "k_offsets run from 0 to 10, allowed: from 0 to 9", torch.tensor([0, 6]), torch.tensor([0, 10])),
        (
            ValueError,
            "sequence 1 runs from offsets 5 back to 2",
            torch.tensor([0, 5, 2, 6]),
            torch.tensor([0, 1, 2, 9]),
        ),
        (ValueError, "k has 9 rows, q 6; pass k_offsets", torch.tensor([0, 6]), None),
    ],
)
def test_what_is_refused_of_offsets(
    error: type[Exception], words: str, offsets: torch.Tensor, k_offsets: torch.Tensor | None
) -> None:
    """Offsets that do not cut the rows into sequences are refused in words, before anything is launched."""
    q, k, v = (each.float() for each in _inputs(queries=6, keys=9))
    with pytest.raises(error, match=words):
        flash_attention(q, k, v, offsets=offsets, k_offsets=k_offsets)


def test_unchecked_offsets_reach_no_foreign_memory() -> None:
    """Nonsense in unchecked offsets gives nonsense, but no access outside of the tensors."""
    q, k, v = (each.float().requires_grad_() for each in _inputs(queries=6, keys=9))
    offsets, k_offsets = torch.tensor([-7, 3, 99, 2, 10**6]), torch.tensor([4, -3, 99, 2, 2**31 - 1], dtype=torch.int32)

    out, _ = flash_attention(q, k, v, offsets=offsets, k_offsets=k_offsets, checked=False)

    torch.autograd.grad(out.nan_to_num().sum(), (q, k, v))
