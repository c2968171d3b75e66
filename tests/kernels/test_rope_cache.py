"""The rope kernel that writes a paged cache, beyond its specs: a second source, padding, registration, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from reference_kernels.decode_attention import decode_attention
from reference_kernels.rope import rope, rope_cache, rope_cache_reference
from reference_kernels.rope.cache import _rope_cache

Inputs = dict[str, Any]


def _inputs(
    tokens: int = 5, q_heads: int = 4, k_heads: int = 2, half: int = 3, rest: int = 2, pages: int = 4, size: int = 3
) -> Inputs:
    """Tokens in the slots from the last on, every other way round."""
    generator = torch.Generator().manual_seed(11)
    dim = 2 * half + rest
    names = {"q": q_heads, "k": k_heads, "v": k_heads}
    found = {name: torch.randn(tokens, heads, dim, generator=generator) for name, heads in names.items()}
    angle = 10 * torch.rand(tokens, half, generator=generator)
    caches = {name: torch.randn(pages, size, k_heads, dim, generator=generator) for name in ("k_cache", "v_cache")}
    slots = torch.arange(pages * size - 1, pages * size - 1 - tokens, -1)
    return {**found, "cos": angle.cos(), "sin": angle.sin(), **caches, "slots": slots}


def _cloned(inputs: Inputs) -> Inputs:
    return {name: tensor.clone() for name, tensor in inputs.items()}


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_reference_and_the_kernel_write_token_by_token(layout: Any) -> None:
    """In float64 the reference, in float32 the kernel, put each token's complex products into its own slot."""
    inputs = _inputs()
    inputs["slots"][1] = -1
    exact = {name: t if name == "slots" else t.double() for name, t in _cloned(inputs).items()}
    turned = exact["cos"] + 1j * exact["sin"]

    def by_complex_numbers(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        for pair in range(3):
            first, second = (pair, pair + 3) if layout == "half" else (2 * pair, 2 * pair + 1)
            product = (x[:, first] + 1j * x[:, second]) * angle[pair]
            out[:, first], out[:, second] = product.real, product.imag
        return out

    wanted_k, wanted_v = exact["k_cache"].clone(), exact["v_cache"].clone()
    wanted_q = torch.stack([by_complex_numbers(exact["q"][token], turned[token]) for token in range(5)])
    for token, slot in enumerate(inputs["slots"].tolist()):
        if slot >= 0:
            wanted_k[slot // 3, slot % 3] = by_complex_numbers(exact["k"][token], turned[token])
            wanted_v[slot // 3, slot % 3] = exact["v"][token]

    reference = rope_cache_reference(**exact, layout=layout, compute=torch.float64)
    fused = rope_cache(**inputs, layout=layout)

    torch.testing.assert_close((reference, exact["k_cache"], exact["v_cache"]), (wanted_q, wanted_k, wanted_v))
    got = fused.double(), inputs["k_cache"].double(), inputs["v_cache"].double()
    torch.testing.assert_close(got, (wanted_q, wanted_k, wanted_v), rtol=1e-5, atol=1e-6)
    assert torch.equal(inputs["v_cache"].double(), wanted_v)


def test_turned_as_by_rope() -> None:
    """Queries, and keys in the cache, have the bits of `rope`'s; pages that no token has keep theirs."""
    inputs = _inputs()
    before = inputs["k_cache"].clone()
    q, k = rope(inputs["q"], inputs["k"], inputs["cos"], inputs["sin"])

    assert torch.equal(rope_cache(**inputs), q)

    flat = inputs["k_cache"].flatten(0, 1)
    assert torch.equal(flat[inputs["slots"]], k)
    assert torch.equal(flat[:-5], before.flatten(0, 1)[:-5])


@pytest.mark.parametrize("scaled", [True, False])
def test_float8_caches(scaled: bool) -> None:
    """Codes are those of ``x / scale`` by head, saturated at 448; NaN stays NaN."""
    inputs = _inputs()
    inputs["v"][0, 0, :4] = torch.tensor([1e4, -1e4, float("inf"), float("nan")])
    scales: Inputs = {f"{name}_scale": torch.tensor([0.5, 2.0]) for name in "kv"} if scaled else {}
    codes: Inputs = {name: torch.zeros(inputs[name].shape).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    inputs |= codes
    _, k = rope(inputs["q"], inputs["k"], inputs["cos"], inputs["sin"])

    rope_cache(**inputs, **scales)

    for name, rows in (("k", k), ("v", inputs["v"])):
        divisor = scales[f"{name}_scale"][:, None] if scaled else torch.ones(1)
        wanted = (rows / divisor).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        got = inputs[f"{name}_cache"].flatten(0, 1)[inputs["slots"]].float()
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_decoding_reads_what_was_written() -> None:
    """Attention over the pages is attention over the turned keys: both kernels mean the same by a slot and a scale."""
    inputs = _inputs(tokens=6, half=8, rest=0, pages=5, size=2)
    table = torch.tensor([[4, 1, 3]])
    inputs["slots"] = torch.tensor([8, 9, 2, 3, 6, 7])
    scales: Inputs = {"k_scale": torch.tensor([0.01, 0.02]), "v_scale": torch.tensor([0.01, 0.02])}
    eight: Inputs = {name: inputs[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
    _, k = rope(inputs["q"], inputs["k"], inputs["cos"], inputs["sin"])
    query, lengths = inputs["q"][:1], torch.tensor([6])

    rope_cache(**inputs)
    rope_cache(**{**inputs, **eight}, **scales)

    plain, _ = decode_attention(query, k[None], inputs["v"][None], lengths)
    paged, _ = decode_attention(query, inputs["k_cache"], inputs["v_cache"], lengths, table)
    coded, _ = decode_attention(query, eight["k_cache"], eight["v_cache"], lengths, table, **scales)
    torch.testing.assert_close(paged, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(coded, plain, rtol=0.1, atol=0.1)


def test_caches_of_any_layout() -> None:
    """Heads before rows, keys and values in one tensor, every other element: written where they lie, no gap touched."""
    inputs = _inputs()
    wanted = _cloned(inputs)
    rope_cache(**wanted)
    whole = torch.full((4, 2, 2, 2, 3, 16), 7.0)
    for number, name in enumerate(("k_cache", "v_cache")):
        view = whole[:, number, 0, :, :, ::2].transpose(1, 2)
        view.copy_(inputs[name])
        inputs[name] = view

    rope_cache(**inputs)

    assert torch.equal(inputs["k_cache"], wanted["k_cache"])
    assert torch.equal(inputs["v_cache"], wanted["v_cache"])
    assert (whole[:, :, 1] == 7).all()
    assert (whole[..., 1::2] == 7).all()


def test_two_leading_dimensions() -> None:
    """Sequences before tokens, one table of angles for all of them and slots that lie the other way round."""
    inputs = _inputs(tokens=6)
    wanted = _cloned(inputs)
    wanted |= {name: inputs[name][:3].repeat(2, 1) for name in ("cos", "sin")}
    expected = rope_cache(**wanted)
    split = {name: inputs[name].unflatten(0, (2, 3)) for name in ("q", "k", "v")}
    slots = inputs["slots"].view(2, 3).t().contiguous().t()

    got = rope_cache(**{**inputs, **split, "cos": inputs["cos"][:3], "sin": inputs["sin"][:3], "slots": slots})

    assert torch.equal(got.flatten(0, 1), expected)
    assert torch.equal(inputs["k_cache"], wanted["k_cache"])


def test_slots_that_nobody_checked() -> None:
    """Unchecked slots below -1 or past the cache write nothing, the others are written."""
    inputs = _inputs()
    inputs["slots"] = torch.tensor([12, -5, 4, 2**40, -1])
    before = _cloned(inputs)

    rope_cache(**inputs, checked=False)

    changed = (inputs["k_cache"] != before["k_cache"]).flatten(0, 1).any(-1).any(-1)
    assert changed.nonzero().flatten().tolist() == [4]


@pytest.mark.slow
def test_opcheck() -> None:
    """Schema (both caches are written), fake kernel and tracing hold, for float8 and strided caches too."""
    inputs = _inputs()
    arguments = list(inputs.values())
    torch.library.opcheck(_rope_cache, (*arguments, None, None, True, True))
    arguments[5] = arguments[5].transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(_rope_cache, (*arguments, torch.ones(2), torch.ones(2), False, False))


@pytest.mark.slow
def test_one_graph() -> None:
    """Compiled without a graph break, views of one tensor as caches are written as without."""
    inputs = _inputs()
    both = torch.stack((inputs["k_cache"], inputs["v_cache"]))

    def step(q: torch.Tensor, k: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        rest = inputs["v"], inputs["cos"], inputs["sin"], *both.unbind(), inputs["slots"]
        return rope_cache(q * 2, k, *rest, checked=False) + both.sum()

    plain, whole = both.clone(), both.clone()
    wanted = step(inputs["q"], inputs["k"], plain)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(inputs["q"], inputs["k"], whole)

    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert torch.equal(whole, plain)
    assert not torch.equal(whole, both)


@pytest.mark.parametrize(
    "sizes",
    [{"tokens": 0}, {"q_heads": 0}, {"k_heads": 0}, {"half": 0}, {"half": 0, "rest": 0}, {"pages": 0}, {"size": 0}],
)
def test_sizes_of_zero(sizes: dict[str, int]) -> None:
    """No tokens, heads, pairs or room: what is left is turned and written."""
    inputs = _inputs(**sizes)
    if inputs["k_cache"].shape[0] * inputs["k_cache"].shape[1] == 0:
        inputs["slots"] = torch.full((5,), -1)
    wanted = _cloned(inputs)
    expected = rope_cache_reference(**wanted)

    torch.testing.assert_close(rope_cache(**inputs), expected, rtol=1e-6, atol=1e-6)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(inputs[name], wanted[name], rtol=1e-6, atol=1e-6)


def _with(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], object]:
    def call(inputs: Inputs) -> object:
        return rope_cache(**inputs | {name: change(inputs[name]) for name, change in changes.items()})

    return call


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (TypeError, "rope_cache: v is float16, allowed: float32", _with(v=torch.Tensor.half)),
        (TypeError, "k_cache is float16, allowed: float32, float8_e4m3fn", _with(k_cache=torch.Tensor.half)),
        (TypeError, "v_cache is float16, allowed: float32", _with(v_cache=torch.Tensor.half)),
        (TypeError, "slots is float32, allowed: int32, int64", _with(slots=torch.Tensor.float)),
        (ValueError, r"v has shape \(4, 2, 8\), allowed: \(5, 2, 8\)", _with(v=lambda v: v[1:])),
        (ValueError, r"slots has shape \(4,\), allowed: \(5,\)", _with(slots=lambda s: s[1:])),
        (ValueError, r"k_scale has shape \(3,\), allowed: \(2,\)", lambda i: rope_cache(**i, k_scale=torch.ones(3))),
        (TypeError, "v_scale is float64", lambda i: rope_cache(**i, v_scale=torch.ones(2).double())),
        (ValueError, r"both caches are \(pages, page_size, 2, 8\)", _with(k_cache=lambda c: c.transpose(1, 2))),
        (ValueError, r"v_cache \(3, 3, 2, 8\) does not fit", _with(v_cache=lambda c: c[1:])),
        (ValueError, "a stride is 0", _with(k_cache=lambda c: c[:1].expand(4, 3, 2, 8))),
        (ValueError, "k_cache requires a gradient", _with(k_cache=torch.Tensor.requires_grad_)),
        (ValueError, "begins at the same address", lambda i: rope_cache(**i | {"v_cache": i["k_cache"]})),
        (ValueError, "cos has 3 angles, sin 2", _with(sin=lambda s: s[:, :2])),
        (ValueError, "slots is on meta", _with(slots=lambda s: s.to("meta"))),
        (
            ValueError,
            "the slot of token 2 is 12, allowed: 0 to 11",
            _with(slots=lambda s: s.new_tensor([0, 1, 12, 2, 3])),
        ),
        (ValueError, "the slot of token 1 is -2", _with(slots=lambda s: s.new_tensor([0, -2, 1, 2, 3]))),
        (ValueError, "tokens 0 and 3 have the same slot, 7", _with(slots=lambda s: s.new_tensor([7, -1, -1, 7, 3]))),
    ],
)
def test_what_is_refused(error: type[Exception], words: str, call: Callable[[Inputs], object]) -> None:
    """What the kernel does not support is refused in words, and the caches are as they were."""
    inputs = _inputs()
    before = inputs["k_cache"].clone()
    with pytest.raises(error, match=words):
        call(inputs)
    assert torch.equal(inputs["k_cache"], before)
