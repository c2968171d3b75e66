"""The decoding kernel beyond its specs: a second source of the reference, chunks, pages, what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from reference_kernels.decode_attention import decode_attention, decode_attention_reference
from reference_kernels.decode_attention.kernel import _decode_attention, config
from reference_kernels.flash_attention import flash_attention


def _inputs(
    batch: int = 3, capacity: int = 40, heads: int = 4, kv_heads: int = 2, features: int = 16
) -> dict[str, Any]:
    """A query for each sequence and caches, in float64 of float32's values; lengths from 0 to the capacity."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "q": (batch, heads, features),
        "k_cache": (batch, capacity, kv_heads, features),
        "v_cache": (batch, capacity, kv_heads, features),
    }
    found = {name: torch.randn(shape, generator=generator).double() for name, shape in shapes.items()}
    lengths = torch.linspace(0, capacity, batch).round().int()
    return {**found, "lengths": lengths}


def _float(given: dict[str, Any]) -> dict[str, Any]:
    return {name: each.float() if each.is_floating_point() else each for name, each in given.items()}


def _paged(given: dict[str, Any], size: int, seed: int = 5) -> dict[str, Any]:
    """The same caches in shuffled pages, among others that hold NaN; numbers of no page after each sequence's end."""
    batch, capacity, kv_heads, features = given["k_cache"].shape
    most = -(-capacity // size)
    order = torch.randperm(batch * most + 5, generator=torch.Generator().manual_seed(seed))
    table = order[: batch * most].view(batch, most)
    found = dict(given)
    for name in ("k_cache", "v_cache"):
        pages = torch.full((len(order), size, kv_heads, features), torch.nan, dtype=given[name].dtype)
        filled = F.pad(given[name], (0, 0, 0, 0, 0, most * size - capacity), value=torch.nan)
        pages[table.flatten()] = filled.view(-1, size, kv_heads, features)
        found[name] = pages
    beyond = torch.arange(most) * size >= given["lengths"][:, None]
    return {**found, "page_table": torch.where(beyond, 10**6, table)}


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_the_reference_is_sdpa(window: int | None) -> None:
    """In float64 each sequence is ``scaled_dot_product_attention`` over the keys that it has, or its window of them."""
    given = _inputs()

    got, lse = decode_attention_reference(**given, window=window, scale=0.3, compute=torch.float64)

    assert bool((got[0] == 0).all())
    assert bool(lse[0].isneginf().all())
    for i, length in enumerate(given["lengths"].tolist()):
        if not length:
            continue
        keys = slice(max(0, length - window) if window else 0, length)
        q, k, v = given["q"][i, :, None], *(given[n][i, keys].transpose(0, 1) for n in ("k_cache", "v_cache"))
        wanted = F.scaled_dot_product_attention(q[None], k[None], v[None], scale=0.3, enable_gqa=True)[0, :, 0]
        torch.testing.assert_close(got[i], wanted, rtol=1e-12, atol=1e-14)
        sums = (q @ k.repeat_interleave(2, 0).mT * 0.3).logsumexp(-1)[:, 0]
        torch.testing.assert_close(lse[i], sums, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1, 5, 16])
def test_the_paged_reference_is_the_contiguous_one(size: int) -> None:
    """Pages in any order give what the same keys in a row give; what no sequence reads may be NaN."""
    given = _inputs()

    wanted = decode_attention_reference(**given, compute=torch.float64)
    got = decode_attention_reference(**_paged(given, size), compute=torch.float64)

    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("capacity", [5, 32, 33, 200])
@pytest.mark.parametrize("window", [None, 1, 50])
def test_one_chunk_and_several(capacity: int, window: int | None) -> None:
    """One launch or two, full chunks, broken ones and chunks without keys give the reference in float64."""
    given = _inputs(4, capacity)
    wanted = decode_attention_reference(**given, window=window, compute=torch.float64)

    got = decode_attention(**_float(given), window=window)

    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 16, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_pages_of_any_size(size: int, window: int | None) -> None:
    """Pages give the bits of the contiguous cache; what no sequence reads may be NaN."""
    given = _float(_inputs(4, 100))

    got = decode_attention(**_paged(given, size), window=window)

    assert all(map(torch.equal, got, decode_attention(**given, window=window)))


def test_unused_slots_may_hold_nan() -> None:
    """What lies past a sequence's length, or before its window, does not reach its result."""
    given = _float(_inputs(4, 70))
    wanted = decode_attention(**given, window=9)
    key = torch.arange(70)
    unused = (key >= given["lengths"][:, None]) | (key < given["lengths"][:, None] - 9)
    for name in ("k_cache", "v_cache"):
        given[name][unused] = torch.nan

    assert all(map(torch.equal, decode_attention(**given, window=9), wanted))


@pytest.mark.parametrize("heads", [1, 7, 71])
def test_groups_of_any_size(heads: int) -> None:
    """One query head on a head of keys, an odd number, and more than one program takes."""
    given = _inputs(2, 40, heads, 1)
    wanted = decode_attention_reference(**given, compute=torch.float64)

    got = decode_attention(**_float(given))

    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_float8_cache_is_read_exactly(dtype: torch.dtype) -> None:
    """A cache of float8 with scales of 1 gives the bits of the same numbers in the queries' dtype; scales of powers of
    two those of scaled numbers."""
    given = {name: each.to(dtype) if each.is_floating_point() else each for name, each in _inputs(3, 70).items()}
    codes = {name: given[name].float().to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    plain = {**given, **{name: each.float().to(dtype) for name, each in codes.items()}}
    ones, scales = torch.ones(2), torch.tensor([0.5, 4.0])

    for scale in (ones, scales):
        got = decode_attention(**{**given, **codes}, k_scale=scale, v_scale=scale)
        scaled = {n: (plain[n].float() * scale[:, None]).to(dtype) for n in codes}
        assert all(map(torch.equal, got, decode_attention(**{**plain, **scaled})))
    assert all(map(torch.equal, decode_attention(**{**given, **codes}), decode_attention(**plain)))


@pytest.mark.parametrize("exponent", [-100, 20, 100, 120])
def test_queries_of_any_size_meet_a_float8_cache(exponent: int) -> None:
    """bfloat16 queries far outside float16's range give the bits that they give at 1, where the scale makes up for
    it."""
    given = {name: each.bfloat16() if each.is_floating_point() else each for name, each in _inputs(3, 70).items()}
    codes = {name: given[name].float().to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    far = given["q"] * 2.0**exponent
    scale = torch.full((2,), 2.0**-exponent)

    wanted = decode_attention(**{**given, **codes}, k_scale=torch.ones(2))
    got = decode_attention(**{**given, **codes, "q": far}, k_scale=scale)

    assert all(map(torch.equal, got, wanted))
    assert got[0].isfinite().all()


def test_decoding_is_attention_of_the_last_query() -> None:
    """A full cache gives what flash_attention gives its last query, to float32 accuracy."""
    given = _float(_inputs(2, 50))
    given["lengths"][:] = 50

    out, lse = decode_attention(**given, window=30)
    wanted, sums = flash_attention(given["q"][:, None], given["k_cache"], given["v_cache"], causal=True, window=30)

    torch.testing.assert_close(out, wanted[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, sums[:, :, 0], rtol=1e-5, atol=1e-6)


def test_a_sequence_does_not_see_how_many_others_there_are() -> None:
    """A result has the same bits alone and in a batch: chunks depend on the capacity."""
    given = _float(_inputs(5, 130))
    whole = decode_attention(**given)
    for i in range(5):
        alone = decode_attention(**{name: each[i : i + 1] for name, each in given.items()})
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, whole, strict=True))


def test_nan_in_a_key_reaches_its_sequence_alone() -> None:
    """NaN in a key that is read makes the queries of its head NaN, through every chunk, and no others."""
    given = _float(_inputs(3, 130))
    given["k_cache"][2, 50, 1, 3] = torch.nan

    out, lse = decode_attention(**given)

    assert (
        out.isnan().any(-1).tolist() == lse.isnan().tolist() == [[False] * 4, [False] * 4, [False, False, True, True]]
    )


@pytest.mark.parametrize(
    ("batch", "capacity", "heads", "kv_heads"), [(0, 5, 2, 1), (2, 0, 2, 1), (2, 5, 0, 0), (2, 5, 0, 2)]
)
def test_sizes_of_zero(batch: int, capacity: int, heads: int, kv_heads: int) -> None:
    """No sequences or heads give empty results; no room for keys gives 0 and minus infinity."""
    out, lse = decode_attention(**_float(_inputs(batch, capacity, heads, kv_heads)))

    assert (out.shape, lse.shape) == ((batch, heads, 16), (batch, heads))
    if capacity == 0:
        assert bool((out == 0).all())
        assert bool(lse.isneginf().all())


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema, fake kernel and tracing hold, strided, paged, float8 and empty inputs included."""
    given = _float(_inputs())
    paged = _paged(given, 8)
    codes = [paged[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")]
    strided = given["q"].transpose(0, 1).contiguous().transpose(0, 1)
    contiguous = (given["k_cache"], given["v_cache"], given["lengths"], None, 3, 0.3, None, None, True)
    torch.library.opcheck(_decode_attention, (strided, *contiguous))
    torch.library.opcheck(_decode_attention, (given["q"][:, :0], *contiguous))
    rest = (given["lengths"], paged["page_table"], None, 0.3, torch.ones(2), torch.ones(2), True)
    torch.library.opcheck(_decode_attention, (given["q"], paged["k_cache"], paged["v_cache"], *rest))
    # test_schema compares inputs before and after by arithmetic, which torch has none of in float8.
    utilities = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(_decode_attention, (given["q"], *codes, *rest), test_utils=utilities)


@pytest.mark.slow
def test_one_graph() -> None:
    """The kernel compiles without a graph break, checked lengths and pages included."""
    given = _paged(_float(_inputs()), 8)

    def call(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return decode_attention(**inputs, window=20)

    whole = torch.compile(call, fullgraph=True, backend="aot_eager")(**given)

    assert all(map(torch.equal, whole, call(**given)))


@pytest.mark.parametrize(("dtype", "cache"), [(torch.float32, torch.float32), (torch.float16, torch.float8_e4m3fn)])
def test_chunks_are_whole_tiles(dtype: torch.dtype, cache: torch.dtype) -> None:
    """Every chunk that a GPU gets is a number of tiles, and there are no more than are combined at once."""
    for group, features, capacity in itertools.product((1, 8, 71), (16, 128, 256), (0, 511, 8192, 131072, 10**6 + 1)):
        tile = config(group, features, capacity, dtype, cache, interpreted=False)
        assert tile.chunk % tile.keys == 0
        assert tile.chunk * 64 >= capacity
        assert all(size & (size - 1) == 0 and size >= 16 for size in (tile.keys, tile.heads))


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (TypeError, "q is float64, allowed: float32", lambda a: {"q": a["q"].double()}),
        (TypeError, "k_cache is float16, allowed: float32, float8_e4m3fn", lambda a: {"k_cache": a["k_cache"].half()}),
        (TypeError, "v_cache is float8_e5m2", lambda a: {"v_cache": a["v_cache"].to(torch.float8_e5m2)}),
        (TypeError, "lengths is float32", lambda a: {"lengths": a["lengths"].float()}),
        (TypeError, "k_scale is float64", lambda a: {"k_scale": torch.ones(2).double()}),
        (ValueError, r"k_scale has shape \(3,\), allowed: \(2,\)", lambda a: {"k_scale": torch.ones(3)}),
        (ValueError, r"q \(4, 16\).* do not fit", lambda a: {"q": a["q"][0]}),
        (ValueError, r"v_cache \(3, 39, 2, 16\) do not fit", lambda a: {"v_cache": a["v_cache"][:, 1:]}),
        (
            ValueError,
            "of one batch unless there is a page_table",
            lambda a: {"q": a["q"][:2], "lengths": a["lengths"][:2]},
        ),
        (ValueError, r"lengths has shape \(2,\), allowed: \(3,\)", lambda a: {"lengths": a["lengths"][:2]}),
        (ValueError, r"page_table has shape \(3,\), allowed: \(3, most\)", lambda a: {"page_table": a["lengths"]}),
        (ValueError, "q has 3 heads, k and v have 2", lambda a: {"q": a["q"][:, :3]}),
        (ValueError, "window is 0", lambda a: {"window": 0}),
        (ValueError, "scale is 0.0", lambda a: {"scale": 0.0}),
        (
            ValueError,
            r"lengths\[2\] is 41, allowed: 0 to 40",
            lambda a: {"lengths": a["lengths"] + torch.tensor([0, 0, 1])},
        ),
        (ValueError, r"lengths\[0\] is -1", lambda a: {"lengths": a["lengths"] - 1}),
    ],
)
def test_what_is_refused(
    error: type[Exception], words: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """What the kernel does not support is refused in words, before anything is launched."""
    given = _float(_inputs())
    with pytest.raises(error, match=words):
        decode_attention(**{**given, **change(given)})


def test_pages_that_do_not_exist() -> None:
    """One among those to be read is refused; one that a window leaves out, or past the end, is not looked at."""
    given = _paged(_float(_inputs(2, 40)), 8)
    for page in (-1, len(given["k_cache"])):
        table = given["page_table"].clone()
        table[1, 1] = page
        with pytest.raises(ValueError, match=rf"page_table\[1, 1\] is {page}, allowed: 0 to 14, since .* 40 keys"):
            decode_attention(**{**given, "page_table": table})
        wanted = decode_attention(**given, window=20)
        assert all(map(torch.equal, decode_attention(**{**given, "page_table": table}, window=20), wanted))


def test_unchecked_numbers_reach_no_foreign_memory() -> None:
    """Unchecked, a page that does not exist makes its sequence NaN, a length is kept from 0 to the capacity."""
    given = _paged(_float(_inputs(3, 40)), 8)
    given["page_table"][1, 1] = 2**40
    given["lengths"] = torch.tensor([-5, 20, 20])

    out, lse = decode_attention(**given, checked=False)

    assert bool((out[0] == 0).all())
    assert bool(out[1].isnan().all())
    assert bool(lse[1].isnan().all())
    assert bool(out[2].isfinite().all())
    plain = _float(_inputs(2, 40))
    wanted = decode_attention(**{**plain, "lengths": torch.tensor([0, 40])})
    assert all(
        map(torch.equal, decode_attention(**{**plain, "lengths": torch.tensor([-1, 10**6])}, checked=False), wanted)
    )
